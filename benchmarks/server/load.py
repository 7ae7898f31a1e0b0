"""Agents without thoughts: conversations that grow by a tool's or a user's words, as many at once as asked for."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
from processes import Served

WORDS = [
    "alpha",
    "test",
    "line",
    "class",
    "value",
    "module",
    "error",
    "return",
    "import",
    "file",
    "index",
    "failed",
    "config",
    "branch",
    "result",
    "path",
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "shell",
            "description": "Runs a command and returns what it prints.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]


def words(rng: random.Random, count: int) -> str:
    """So many words, nearly each of which is one token."""
    return " ".join(rng.choices(WORDS, k=count))


def chat(messages: list[dict[str, Any]]) -> bytes:
    """The body of a turn."""
    return orjson.dumps({"model": "m", "messages": messages, "tools": TOOLS, "max_tokens": 512, "temperature": 1.0})


@dataclass(frozen=True, kw_only=True)
class Workload:
    """How many conversations of how many turns, what each turn adds, and how many of them run at once."""

    sessions: int
    turns: int
    tokens: int
    at_once: int
    first: int = 200
    close: bool = False
    """Whether every request opens a connection."""
    keep: bool = False
    """Whether sessions are kept until the end, and no samples collected."""

    def __str__(self) -> str:
        extras = [f"first prompt {self.first}"] if self.first != 200 else []
        extras += ["a connection each"] if self.close else []
        extras += ["all kept"] if self.keep else []
        return ", ".join(
            [f"{self.sessions} × {self.turns}", f"{self.tokens} tokens", f"{self.at_once} at once", *extras]
        )


@dataclass
class Cost:
    """What a workload cost the server."""

    turns: int
    cpu: float
    """Milliseconds for each turn."""
    grown: float
    """Resident megabytes for each session."""
    rate: float
    """Turns per second."""
    seconds: list[float] = field(default_factory=list)
    """How long each turn took, in order of size."""


class Agent:
    """One conversation with a server."""

    def __init__(self, http: aiohttp.ClientSession, url: str, number: int, first: int) -> None:
        self._http = http
        self._url = url
        self._rng = random.Random(number)
        self.id = ""
        self.prompt_tokens = 0
        """How long the last turn's prompt was, as the engine counted it."""
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": "You repair programs. " + words(self._rng, first)},
            {"role": "user", "content": f"Ticket {number}: repair it."},
        ]

    async def open(self) -> None:
        """Create the session."""
        self.id = orjson.loads(await self._post("/sessions", b"{}"))["session_id"]

    async def turn(self) -> float:
        """One turn, whose answer joins the conversation; returns its seconds."""
        body = chat(self.messages)
        began = time.perf_counter()
        raw = await self._post(f"/sessions/{self.id}/v1/chat/completions", body)
        took = time.perf_counter() - began
        reply = orjson.loads(raw)
        self.prompt_tokens = reply["usage"]["prompt_tokens"]
        message = reply["choices"][0]["message"]
        self.messages.append({key: value for key, value in message.items() if value is not None})
        return took

    def hear(self, count: int) -> None:
        """A tool's result, or now and then the user's words."""
        turn = len(self.messages) // 2
        heard = {"role": "user"} if turn % 5 == 0 else {"role": "tool", "tool_call_id": f"call_{turn}"}
        self.messages.append({**heard, "content": words(self._rng, count)})

    async def repeat(self, url: str, count: int, headers: Mapping[str, str]) -> None:
        """The turn that had so many messages once more, at another server; its answer is not heard."""
        await self._post(f"/sessions/{self.id}/v1/chat/completions", chat(self.messages[:count]), headers, url)

    async def samples(self) -> None:
        """Collect them."""
        await self._post(f"/sessions/{self.id}/samples", b'{"max_seq_len":null}')

    async def close(self) -> None:
        """Delete the session."""
        async with self._http.delete(f"{self._url}/sessions/{self.id}") as answer:
            await answer.read()

    async def _post(
        self, path: str, body: bytes, headers: Mapping[str, str] | None = None, url: str | None = None
    ) -> bytes:
        sent = {"content-type": "application/json", **(headers or {})}
        async with self._http.post((url or self._url) + path, data=body, headers=sent) as answer:
            raw = await answer.read()
            if answer.status != 200:
                raise SystemExit(f"POST {path}: {answer.status} {raw[:300]!r}")
            return raw


def connections(*, close: bool = False) -> aiohttp.ClientSession:
    """As many connections as are asked for."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=close), timeout=aiohttp.ClientTimeout(600)
    )


async def converse(
    http: aiohttp.ClientSession, server: Served, number: int, work: Workload
) -> tuple[Agent, list[float]]:
    """One whole conversation."""
    agent = Agent(http, server.url, number, work.first)
    await agent.open()
    seconds = []
    for _ in range(work.turns):
        seconds.append(await agent.turn())
        agent.hear(work.tokens)
    if not work.keep:
        await agent.samples()
        await agent.close()
    return agent, seconds


async def measure(server: Served, work: Workload) -> Cost:
    """Run a workload against a server, after a short one that warms it up."""
    async with connections(close=work.close) as http:
        warm = Workload(sessions=1, turns=3, tokens=work.tokens, at_once=1, first=work.first)
        await converse(http, server, 1_000_000, warm)
        room = asyncio.Semaphore(work.at_once)

        async def one(number: int) -> tuple[Agent, list[float]]:
            async with room:
                return await converse(http, server, number, work)

        memory, cpu, began = server.memory(), server.cpu(), time.perf_counter()
        done = await asyncio.gather(*map(one, range(work.sessions)))
        took, cpu, memory = time.perf_counter() - began, server.cpu() - cpu, server.memory() - memory
        if work.keep:
            for agent, _ in done:
                await agent.close()
    seconds = sorted(second for _, each in done for second in each)
    turns = len(seconds)
    return Cost(turns, cpu * 1e3 / turns, memory / work.sessions, turns / took, seconds)
