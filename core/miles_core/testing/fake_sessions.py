"""A session server that answers from a script: the protocol of the real one, without tokens of a model.

A turn has three prompt ids and two sampled ids. In a test of an agent:

    fake = FakeSessions([call("search", '{"for": "x"}'), say("Found.")])
    with serving_in_thread(fake) as url:
        ...  # POST {url}/sessions, as a generate function does, or `play_agent` of `miles_core.testing.trials`
    assert fake.requests[0]["temperature"] == 0.7
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import orjson
from aiohttp import web
from safetensors.numpy import save

Answer: TypeAlias = dict[str, Any] | int
"""An assistant's message, or the HTTP status of a refusal."""
Script: TypeAlias = Callable[[dict[str, Any]], Answer]
"""The answer to a request's body."""

INSTANCE = "0123456789abcdef0123456789abcdef"


def call(name: str, arguments: str, *, reasoning: str = "", number: int = 0) -> dict[str, Any]:
    """An assistant message that calls a tool; `arguments` are JSON text."""
    message = say("", reasoning=reasoning)
    function = {"name": name, "arguments": arguments}
    return {**message, "tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}]}


def say(content: str, *, reasoning: str = "") -> dict[str, Any]:
    """An assistant message of text."""
    message = {"role": "assistant", "content": content}
    return {**message, "reasoning_content": reasoning} if reasoning else message


@dataclass
class FakeSession:
    """Turns of one session, and the requests that made them."""

    requests: list[dict[str, Any]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class FakeSessions:
    """The server's state; tests read it and set what it should do.

    `script` are the answers of each session's turns in order, the last one over and over; or a function of the request.
    """

    script: Sequence[Answer] | Script = field(default_factory=lambda: [say("Fine.")])
    samples_status: int = 200
    session_metadata: dict[str, Any] = field(default_factory=lambda: {"tito_session_mismatch": []})
    rows: list[dict[str, Any]] | None = None
    """What each sample's JSON adds, one dict per sample; None gives one sample."""
    with_experts: bool = False
    empty_reason: str | None = None
    drop_samples: bool = False
    api_key: str | None = None
    sessions: dict[str, FakeSession] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    sample_bodies: list[dict[str, Any]] = field(default_factory=list)
    base_url: str | None = None
    on_turn: Callable[[FakeSessions], None] = lambda fake: None
    hold: asyncio.Event | None = None
    """If set, turns wait for it."""

    @property
    def turns(self) -> int:
        """Turns answered by all sessions."""
        return sum(len(session.messages) for session in self.sessions.values())

    @property
    def requests(self) -> list[dict[str, Any]]:
        """Bodies of all turns' requests, session by session."""
        return [request for session in self.sessions.values() for request in session.requests]

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_post("/sessions", self._create)
        app.router.add_delete("/sessions/{id}", self._delete)
        app.router.add_post("/sessions/{id}/samples", self._samples)
        app.router.add_post("/sessions/{id}/v1/chat/completions", self._turn)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "session_server_instance_id": INSTANCE})

    async def _create(self, request: web.Request) -> web.Response:
        self.headers.append(dict(request.headers))
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "a key is needed"}, status=401)
        name = uuid.uuid4().hex
        self.sessions[name] = FakeSession()
        base = f"http://{request.host}/sessions/{name}"
        return web.json_response({"session_id": name, "base_url": base})

    async def _delete(self, request: web.Request) -> web.Response:
        self.deleted.append(request.match_info["id"])
        return web.Response(status=204)

    async def _turn(self, request: web.Request) -> web.Response:
        body = await request.json()
        session = self.sessions[request.match_info["id"]]
        session.requests.append(body)
        self.on_turn(self)
        if self.hold is not None:
            await self.hold.wait()
        answer = self._answer(session, body)
        if isinstance(answer, int):
            return web.json_response({"error": f"scripted {answer}"}, status=answer)
        session.messages.append(answer)
        choice = {"index": 0, "message": answer, "finish_reason": "stop", "logprobs": None}
        return web.json_response(
            {"id": "r", "object": "chat.completion", "created": 0, "model": "fake", "choices": [choice]}
        )

    def _answer(self, session: FakeSession, body: dict[str, Any]) -> Answer:
        if callable(self.script):
            return self.script(body)
        return self.script[min(len(session.requests), len(self.script)) - 1]

    async def _samples(self, request: web.Request) -> web.Response:
        self.sample_bodies.append(await request.json())
        if self.drop_samples:
            assert request.transport is not None
            request.transport.abort()
        if self.samples_status != 200:
            return web.json_response({"error": "scripted refusal"}, status=self.samples_status)
        turns = len(self.sessions[request.match_info["id"]].messages)
        payload = self._payload(turns)
        return web.Response(body=payload, content_type="application/octet-stream")

    def _payload(self, turns: int) -> bytes:
        reason = self.empty_reason or (None if turns else "no_records")
        rows = [] if reason else (self.rows if self.rows is not None else [{}])
        tensors: dict[str, Any] = {}
        samples = []
        for at, extra in enumerate(rows):
            response = [0] * 3 * turns + [0] * 2 * turns
            mask = ([1, 1, 0, 0, 0] * turns)[: len(response) - 3]
            tensors[f"tokens.{at}"] = np.arange(3 + len(mask), dtype=np.int64)
            tensors[f"loss_mask.{at}"] = np.array(mask, dtype=np.uint8)
            tensors[f"rollout_log_probs.{at}"] = np.array([-0.5 * on for on in mask], dtype=np.float64)
            nulls = ["rollout_routed_experts", "rollout_indexer_topk"]
            if self.with_experts:
                nulls = nulls[1:]
                experts = np.arange((2 + len(mask)) * 4, dtype=np.int32).reshape(-1, 2, 2)
                tensors[f"rollout_routed_experts.{at}"] = experts
            samples.append(
                {
                    "response": "text",
                    "response_length": len(mask),
                    "status": "completed",
                    "weight_versions": ["v1"] * turns,
                    "prefix_cache_info": {"cached_tokens": 1, "total_prompt_tokens": 2},
                    "spec_info": {},
                    "metadata": {},
                    "nulls": nulls,
                    **extra,
                }
            )
        meta = {"samples": samples, "session_metadata": self.session_metadata, "empty_reason": reason}
        tensors["_samples_meta"] = np.frombuffer(orjson.dumps(meta), dtype=np.uint8)
        return bytes(save(tensors))


@asynccontextmanager
async def serving(fake: FakeSessions) -> AsyncIterator[str]:
    """Serve in the running loop; yields the URL."""
    runner = web.AppRunner(fake.app(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextmanager
def serving_in_thread(fake: FakeSessions) -> Iterator[str]:
    """Serve in a thread with its own loop, for tests that are not async; yields the URL."""
    ready = threading.Event()
    place: list[Any] = []

    async def main() -> None:
        stop = asyncio.Event()
        async with serving(fake) as url:
            place.extend([url, asyncio.get_running_loop(), stop])
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    if not ready.wait(10):
        raise RuntimeError("the fake session server does not listen after 10 s")
    try:
        yield str(place[0])
    finally:
        place[1].call_soon_threadsafe(place[2].set)
        thread.join(10)
