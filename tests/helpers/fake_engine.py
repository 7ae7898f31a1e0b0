"""A scriptable stand-in for an SGLang worker: fixed replies, faults on demand, every request recorded."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from helpers.chat_tokenizer import IM_END, encode

Json = Any


class Gate:
    """Holds a reply back until `open()`; `entered` is set when a request has arrived at it."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._opened = threading.Event()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def pass_through(self) -> None:
        """Wait in the engine's loop."""
        here = asyncio.Event()
        self._waiters.append((asyncio.get_running_loop(), here))
        self.entered.set()
        if not self._opened.is_set():
            await here.wait()

    def open(self) -> None:
        """Let everything through, from any thread."""
        self._opened.set()
        for loop, event in list(self._waiters):
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)


@dataclass(kw_only=True)
class Reply:
    """What the engine answers to one request. `cut` sends that many bytes of the body, then breaks the connection."""

    body: bytes
    status: int = 200
    headers: Sequence[tuple[str, str]] = (("Content-Type", "application/json"),)
    gate: Gate | None = None
    cut: int | None = None
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    @property
    def json(self) -> Json:
        """The body, read."""
        return json.loads(self.body)

    def with_json(self, change: Callable[[Json], None]) -> Reply:
        """The same reply with its JSON changed in place."""
        value = self.json
        change(value)
        self.body = json.dumps(value, ensure_ascii=False).encode("utf-8")
        return self


_numbers = itertools.count(1)


def sampled_text(content: str, reasoning: str, calls: Sequence[tuple[str, str]]) -> str:
    """What Qwen3 writes for a message, without the end-of-turn token."""
    text = f"<think>\n{reasoning}\n</think>\n\n{content}"
    for number, (name, arguments) in enumerate(calls):
        lead = "\n" if content or number else ""
        text += f'{lead}<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    return text


def says(
    content: str = "Fine.",
    *,
    reasoning: str = "Well.",
    calls: Sequence[tuple[str, str]] = (),
    ids: Sequence[int] | None = None,
    log_probs: Sequence[Any] | None = None,
    finish: str | None = None,
    meta: dict[str, Any] | None = None,
    prompt: int = 10,
    gate: Gate | None = None,
) -> Reply:
    """A good chat answer. The ids are what the model would sample for it, log-probs are all different."""
    number = next(_numbers)
    sampled = [*encode(sampled_text(content, reasoning, calls)), IM_END] if ids is None else list(ids)
    values = [-(number % 97 + 1) / 128 - at / 65536 for at in range(len(sampled))] if log_probs is None else log_probs
    finish = finish or ("tool_calls" if calls else "stop")
    message: dict[str, Any] = {"role": "assistant", "content": content, "reasoning_content": reasoning or None}
    message["tool_calls"] = [
        {"id": f"call_{number}_{at}", "type": "function", "index": at, "function": {"name": name, "arguments": args}}
        for at, (name, args) in enumerate(calls)
    ] or None
    info = {
        "id": f"rid-{number}",
        "finish_reason": {"type": "stop" if finish == "tool_calls" else finish, "matched": IM_END},
        "prompt_tokens": prompt,
        "completion_tokens": len(sampled),
        "cached_tokens": 3,
        "weight_version": "w1",
        "output_token_logprobs": [[value, token, None] for value, token in zip(values, sampled, strict=False)],
        **(meta or {}),
    }
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": len(sampled),
        "total_tokens": prompt + len(sampled),
    }
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish, "meta_info": info}
    reply = {"id": f"chat-{number}", "object": "chat.completion", "created": 1, "model": "fake", "choices": [choice]}
    body = json.dumps({**reply, "usage": usage}, ensure_ascii=False).encode("utf-8")
    return Reply(body=body, gate=gate, ids=sampled, log_probs=list(values))


def refuses(status: int, body: bytes, *headers: tuple[str, str], kind: str = "application/json") -> Reply:
    """An answer that is not 200."""
    return Reply(body=body, status=status, headers=(("Content-Type", kind), *headers))


@dataclass(frozen=True)
class Recorded:
    """One request that arrived."""

    method: str
    path: str
    header_lines: list[tuple[str, str]]
    raw: bytes

    @property
    def headers(self) -> dict[str, str]:
        """The header lines as a mapping."""
        return dict(self.header_lines)

    @property
    def body(self) -> Json:
        """The JSON sent."""
        return json.loads(self.raw)


class FakeEngine:
    """Serves in a thread. `script` is used up one reply a turn; after it, every turn gets `says()`."""

    def __init__(self) -> None:
        self.script: deque[Reply | Callable[[Json], Reply]] = deque()
        self.requests: list[Recorded] = []
        self.always: Callable[[Json], Reply] = lambda body: says()
        self.port = 0
        self._changed = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Where it listens; the same after a restart."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def turns(self) -> list[Json]:
        """Bodies of the chat requests, in order."""
        return [r.body for r in self.requests if r.path == "/v1/chat/completions"]

    @property
    def aborted(self) -> list[str]:
        """The ids that were to be aborted."""
        return [r.body["rid"] for r in self.requests if r.path == "/abort_request"]

    def reset(self) -> None:
        """Forget the script and what was recorded."""
        self.script.clear()
        self.requests.clear()
        self.always = lambda body: says()

    def plays(self, *replies: Reply | Callable[[Json], Reply]) -> None:
        """Add to the script."""
        self.script.extend(replies)

    def wait_for(self, condition: Callable[[], bool], timeout: float = 10) -> None:
        """Until the condition, looked at after each request, holds."""
        with self._changed:
            assert self._changed.wait_for(condition, timeout), f"not within {timeout} s"

    def _record(self, recorded: Recorded) -> None:
        with self._changed:
            self.requests.append(recorded)
            self._changed.notify_all()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        recorded = Recorded(request.method, request.path, list(request.headers.items()), await request.read())
        self._record(recorded)
        if request.path == "/abort_request":
            return web.Response()
        if request.path == "/v1/chat/completions":
            given = self.script.popleft() if self.script else self.always
            reply = given(recorded.body) if callable(given) else given
        else:
            reply = Reply(body=json.dumps({"path": request.path, "query": request.rel_url.raw_query_string}).encode())
        if reply.gate is not None:
            await reply.gate.pass_through()
        response = web.StreamResponse(status=reply.status)
        for name, value in reply.headers:
            response.headers.add(name, value)
        response.content_length = len(reply.body)
        await response.prepare(request)
        if reply.cut is not None:
            await response.write(reply.body[: reply.cut])
            assert request.transport is not None
            request.transport.abort()
            return response
        if request.method != "HEAD":
            await response.write(reply.body)
        return response

    async def _main(self, ready: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=2**28)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = runner.addresses[0][1]
        ready.set()
        await self._stop.wait()
        await runner.cleanup()

    def start(self) -> None:
        """Listen, on the port used before if there was one."""
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(ready)), daemon=True)
        self._thread.start()
        assert ready.wait(10)

    def stop(self) -> None:
        """Stop listening and break every connection."""
        if self._thread is None or self._loop is None or self._stop is None:
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._thread = None


@contextmanager
def fake_engine() -> Iterator[FakeEngine]:
    """A running engine."""
    engine = FakeEngine()
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()
