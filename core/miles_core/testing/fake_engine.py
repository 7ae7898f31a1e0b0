"""A scriptable stand-in for an SGLang worker: fixed replies, faults on demand, every request recorded.

In a test: `with fake_engine() as engine: engine.plays(engine.says("Four."))`. As a process, for what starts engines:
`python -m miles_core.testing.fake_engine --port 8000`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from aiohttp import web

from miles_core.testing.fake_stream import chat_events
from miles_core.types import Json, Message

if TYPE_CHECKING:
    from miles_core.tito import BoundFamily

Answer: TypeAlias = "Reply | Callable[[Json], Reply]"
"""An entry of the script: a reply, or what makes one from the request's body."""

SETTLING = 5
"""Turns of the event loop after which a connection that was just accepted is one that is closed with the others."""

CHAT, GENERATE = "/v1/chat/completions", "/generate"


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
    """What the engine answers to one request. `cut` sends that many bytes of the body, then breaks the connection.

    A good answer to a request with `stream=true` is sent as events. `edit` changes the list of them, and may put gates
    in between; of a stream `cut` is a number of events.
    """

    body: bytes
    status: int = 200
    headers: Sequence[tuple[str, str]] = (("Content-Type", "application/json"),)
    gate: Gate | None = None
    cut: int | None = None
    edit: Callable[[list[bytes]], Sequence[bytes | Gate]] = list
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


def chat_reply(
    ids: Sequence[int],
    content: str = "",
    *,
    reasoning: str = "",
    calls: Sequence[tuple[str, str]] = (),
    log_probs: Sequence[Any] | None = None,
    finish: str | None = None,
    meta: Mapping[str, Any] | None = None,
    prompt: int = 10,
    gate: Gate | None = None,
) -> Reply:
    """A chat answer as SGLang gives it: the message, and the ids it was sampled as, with their log-probabilities.

    Log-probabilities are made up and all different. `calls` are names and arguments (JSON text) of tool calls;
    `prompt` is how many prompt tokens it reports.
    """
    number = next(_numbers)
    made_up = [-(number % 97 + 1) / 128 - at / 65536 for at in range(len(ids))]
    values = made_up if log_probs is None else list(log_probs)
    finish = finish or ("tool_calls" if calls else "stop")
    message: dict[str, Any] = {"role": "assistant", "content": content, "reasoning_content": reasoning or None}
    message["tool_calls"] = [
        {"id": f"call_{number}_{at}", "type": "function", "index": at, "function": {"name": name, "arguments": args}}
        for at, (name, args) in enumerate(calls)
    ] or None
    matched = ids[-1] if ids else None
    info = {
        "id": f"rid-{number}",
        "finish_reason": {"type": "stop" if finish == "tool_calls" else finish, "matched": matched},
        "prompt_tokens": prompt,
        "completion_tokens": len(ids),
        "cached_tokens": 3,
        "weight_version": "w1",
        "output_token_logprobs": [[value, token, None] for value, token in zip(values, ids, strict=False)],
        **(meta or {}),
    }
    usage = {"prompt_tokens": prompt, "completion_tokens": len(ids), "total_tokens": prompt + len(ids)}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish, "meta_info": info}
    reply = {"id": f"chat-{number}", "object": "chat.completion", "created": 1, "model": "fake", "choices": [choice]}
    body = json.dumps({**reply, "usage": usage}, ensure_ascii=False).encode("utf-8")
    return Reply(body=body, gate=gate, ids=list(ids), log_probs=values)


def refuses(status: int, body: bytes, *headers: tuple[str, str], kind: str = "application/json") -> Reply:
    """An answer that is not 200."""
    return Reply(body=body, status=status, headers=(("Content-Type", kind), *headers))


def sampled(family: BoundFamily, message: Message) -> list[int]:
    """The ids that a model of this family samples to say an assistant's message, stop token included.

    Raises ValueError if the family's template leaves no way to say it.
    """
    from miles_core.testing.verify.sampling import said, sampled_ids

    asked: list[Message] = [{"role": "user", "content": "u"}]

    def marked(reasoning: str) -> str:
        return family.render([*asked, {**message, "reasoning_content": reasoning}], None, None, False)

    prompt, history = family.render(asked), family.render([*asked, message], None, None, False)
    turn = said(family, prompt, history, message, marked)
    if turn is None:
        raise ValueError(f"{family.template.source} does not write {message} behind its generation prompt")
    return sampled_ids(family, family.encode(turn.text))


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
    """Serves in a thread. `script` is used up one reply a turn; after it, every turn gets `always(body)`.

    `family` says which ids a message is sampled as; without one it is plain ChatML with a token per byte. Turns are
    requests to `/v1/chat/completions`, and to `/generate`, which gets the same reply in its own form. Any other path is
    answered with what was asked. What a session server asks to see how its engine is, is not recorded.
    """

    def __init__(
        self, family: BoundFamily | None = None, *, always: Callable[[Json], Reply] | None = None, port: int = 0
    ) -> None:
        self.script: deque[Answer] = deque()
        self.answers: dict[str, Callable[[Json], Reply]] = {}
        """Other paths, such as `/update_weights_from_disk`, and what makes their answer from the body, `{}` if none."""
        self.requests: list[Recorded] = []
        self.port = port
        self.streams = False
        self.weight_version = "w1"
        self.written: list[float] = []
        """When the events of streams were sent, by `time.perf_counter`."""
        self._family = family
        self._first = self.always = always or (lambda body: self.says("Fine."))
        self._changed = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread: threading.Thread | None = None

    @property
    def family(self) -> BoundFamily:
        """Whose ids the replies have."""
        if self._family is None:
            from miles_core.testing.fake_tokenizer import chatml

            self._family = chatml()
        return self._family

    @property
    def url(self) -> str:
        """Where it listens; the same after a restart."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def turns(self) -> list[Json]:
        """Bodies of the turns' requests, in order."""
        return [r.body for r in self.requests if r.path in (CHAT, GENERATE)]

    @property
    def aborted(self) -> list[str]:
        """The ids that were to be aborted."""
        return [r.body["rid"] for r in self.requests if r.path == "/abort_request"]

    def says(self, content: str = "", **fields: Any) -> Reply:
        """A good answer with the ids that the family's model samples for it; `fields` are those of `chat_reply`."""
        message: Message = {"role": "assistant", "content": content}
        if fields.get("reasoning"):
            message["reasoning_content"] = fields["reasoning"]
        if fields.get("calls"):
            message["tool_calls"] = [
                {"id": f"call_{at}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for at, (name, arguments) in enumerate(fields["calls"])
            ]
        return chat_reply(fields.pop("ids", None) or sampled(self.family, message), content, **fields)

    def reset(self) -> None:
        """Forget the script and what was recorded."""
        self.script.clear()
        self.requests.clear()
        self.answers.clear()
        self.written.clear()
        self.streams, self.weight_version = False, "w1"
        self.always = self._first

    def plays(self, *replies: Answer) -> None:
        """Add to the script."""
        self.script.extend(replies)

    def wait_for(self, condition: Callable[[], bool], timeout: float = 10) -> None:
        """Until the condition, looked at after each request, holds. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(condition, timeout):
                raise TimeoutError(f"not within {timeout} s")

    def _record(self, recorded: Recorded) -> None:
        with self._changed:
            self.requests.append(recorded)
            self._changed.notify_all()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        recorded = Recorded(request.method, request.path, list(request.headers.items()), await request.read())
        if "X-Miles-Check" not in request.headers:  # the session server asks how the engine is
            self._record(recorded)
        if request.path == "/abort_request":
            return web.Response()
        if request.path in (CHAT, GENERATE):
            given = self.script.popleft() if self.script else self.always
            reply = given(recorded.body) if callable(given) else given
            if request.path == GENERATE:
                reply = self._as_generate(reply)
            elif recorded.body.get("stream") and reply.status == 200 and reply.log_probs:
                return await self._send_events(request, reply, recorded.body)
        elif request.path == "/model_info" and self.streams:
            reply = Reply(body=json.dumps(self.model_info()).encode())
        elif request.path in self.answers:
            reply = self.answers[request.path](recorded.body if recorded.raw else {})
        else:
            reply = Reply(body=json.dumps({"path": request.path, "query": request.rel_url.raw_query_string}).encode())
        if reply.gate is not None:
            await reply.gate.pass_through()
        return await self._send(request, reply)

    async def _send(self, request: web.Request, reply: Reply) -> web.StreamResponse:
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

    def model_info(self) -> Json:
        """What it says of itself."""
        parsers = {"reasoning_parser": "qwen3", "tool_call_parser": "qwen"}
        return {"weight_version": self.weight_version, **parsers}

    async def _send_events(self, request: web.Request, reply: Reply, body: Json) -> web.StreamResponse:
        if body.get("return_meta_info"):
            refusal = {"object": "error", "message": "return_meta_info is not supported with streaming.", "code": 400}
            return await self._send(request, Reply(body=json.dumps(refusal).encode(), status=400))
        if reply.gate is not None:
            await reply.gate.pass_through()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        events = reply.edit(chat_events(reply.json, body, lambda token: self.family.tokenizer.decode([token])))
        for event in events[: reply.cut]:
            if isinstance(event, Gate):
                await event.pass_through()
                continue
            self.written.append(time.perf_counter())
            await response.write(event)
        if reply.cut is not None:
            assert request.transport is not None
            request.transport.abort()
        return response

    def _as_generate(self, reply: Reply) -> Reply:
        """A chat answer in the form of `/generate`; other replies as they are."""
        if reply.status != 200 or not reply.ids:
            return reply
        meta = reply.json["choices"][0]["meta_info"]
        text = self.family.tokenizer.decode(reply.ids)
        body = json.dumps({"text": text, "output_ids": reply.ids, "meta_info": meta}).encode("utf-8")
        return Reply(body=body, gate=reply.gate, cut=reply.cut, ids=reply.ids, log_probs=reply.log_probs)

    async def _main(self, ready: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=2**28)
        app.router.add_route("*", "/{path:.*}", self._answer)
        # 0 would wait for replies that are held back
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = runner.addresses[0][1]
        ready.set()
        await self._stop.wait()
        await site.stop()
        for _ in range(SETTLING):
            await asyncio.sleep(0)
        await runner.cleanup()

    def start(self) -> None:
        """Listen, on the port used before if there was one. Raises OSError if it cannot."""
        ready = threading.Event()
        failed: list[OSError] = []

        def serve() -> None:
            try:
                asyncio.run(self._main(ready))
            except OSError as error:
                failed.append(error)
                ready.set()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        if not ready.wait(10):
            raise RuntimeError(f"the fake engine does not listen at port {self.port} after 10 s")
        if failed:
            raise failed[0]
        self._thread = thread

    def stop(self) -> None:
        """Stop listening and break every connection."""
        if self._thread is None or self._loop is None or self._stop is None:
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        if self._thread.is_alive():
            raise RuntimeError("the fake engine did not stop within 10 s")
        self._thread = None


@contextmanager
def fake_engine(family: BoundFamily | None = None) -> Iterator[FakeEngine]:
    """A running engine."""
    engine = FakeEngine(family)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def main() -> None:
    """Serve at a given port until the process is stopped."""
    parser = argparse.ArgumentParser(prog="python -m miles_core.testing.fake_engine", description=main.__doc__)
    parser.add_argument("--port", type=int, required=True)
    engine = FakeEngine(port=parser.parse_args().port)
    engine.start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
