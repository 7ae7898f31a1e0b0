"""A request and its reply over ASGI, without a framework: every turn passes here, and each layer is paid for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs

import orjson

from miles_core.errors import BodyTooLarge

Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
"""As ASGI has them: names in lower case."""

WATCH_AFTER = 0.05
"""Seconds after which a waiting request is watched for its client hanging up: a quick answer needs no watcher."""


class HungUp(Exception):
    """The client left before its request was whole."""


class Request:
    """One request; its body is read once."""

    __slots__ = ("_receive", "headers", "method", "path", "query", "scope")

    def __init__(self, scope: Event, receive: Receive) -> None:
        self.scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: str = scope["query_string"].decode("latin-1")
        self.headers: Headers = scope["headers"]
        self._receive = receive

    def header(self, name: bytes) -> str | None:
        """The first header of that name (in lower case)."""
        for known, value in self.headers:
            if known == name:
                return value.decode("latin-1")
        return None

    def parameter(self, name: str) -> str | None:
        """The last query parameter of that name."""
        values = parse_qs(self.query, keep_blank_values=True).get(name) if self.query else None
        return values[-1] if values else None

    @property
    def target(self) -> bytes:
        """Path and query as they were sent."""
        raw, query = self.scope["raw_path"], self.scope["query_string"]
        return bytes(raw + b"?" + query if query else raw)

    @property
    def internal(self) -> bool:
        """Whether another process of this server asks, not a client."""
        return bool(self.scope.get("state", {}).get("internal"))

    @property
    def base_url(self) -> str:
        """The server's URL as the client wrote it."""
        server = self.scope.get("server") or ("localhost", None)
        named = server[0] if server[1] is None else f"{server[0]}:{server[1]}"
        return f"{self.scope['scheme']}://{self.header(b'host') or named}"

    async def body(self, limit: int) -> bytes:
        """The body. Raises BodyTooLarge (413), as early as its length is known, and HungUp if it breaks off."""
        declared = self.header(b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > limit:
            raise _too_large(limit)
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            event = await self._receive()
            if event["type"] == "http.disconnect":
                raise HungUp
            parts.append(event.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise _too_large(limit)
            more = event.get("more_body", False)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def disconnected(self) -> None:
        """Return when the client has hung up; call after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request body is over the limit of {limit / 2**20:.3g} MB (--max-body-mb)")


class WhileConnected:
    """Cancels the task inside a `with` block when the client hangs up; `gone` says so, and the block ends quietly."""

    __slots__ = ("_request", "_task", "_timer", "_watcher", "gone")

    def __init__(self, request: Request) -> None:
        self._request = request
        self._watcher: asyncio.Task[None] | None = None
        self.gone = False

    def __enter__(self) -> WhileConnected:
        loop = asyncio.get_running_loop()
        self._task = asyncio.current_task(loop)
        self._timer = loop.call_later(WATCH_AFTER, self._begin, loop)
        return self

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._watcher = loop.create_task(self._watch())

    async def _watch(self) -> None:
        await self._request.disconnected()
        self.gone = True
        if self._task is not None:
            self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None  # its traceback refers to this: memory should not wait for the search for cycles
        if not self.gone or kind is not asyncio.CancelledError:
            return False
        if self._task is not None:
            self._task.uncancel()
        return True


PIECE = 2**18
"""Bytes that are handed to the connection at once, so that a long answer leaves the loop to others."""


@dataclass(slots=True)
class Reply:
    """What is answered: a body, whole or in parts whose size is known, or parts as they come.

    `close` is called when the parts are sent or nobody reads them.
    """

    body: bytes | Sequence[bytes | memoryview] | AsyncGenerator[bytes, None] = b""
    status: int = 200
    kind: bytes | None = None
    """The content type; none for an answer that brings its own headers."""
    headers: Headers = field(default_factory=list)
    first: bytes = b""
    """What comes before the parts."""
    close: Callable[[], object] | None = None

    async def send(self, request: Request, send: Send) -> None:
        """Send it; parts only as long as the client is there."""
        headers = [(b"content-type", self.kind), *self.headers] if self.kind is not None else self.headers
        start = {"type": "http.response.start", "status": self.status, "headers": headers}
        body = self.body
        if isinstance(body, AsyncGenerator):
            await self._stream(body, start, request, send)
            return
        parts = [body] if isinstance(body, bytes) else body
        size = sum(map(len, parts))
        if self.status not in (204, 304):
            start["headers"] = [*headers, (b"content-length", b"%d" % size)]
        await send(start)
        if size <= PIECE:
            await send({"type": "http.response.body", "body": body if isinstance(body, bytes) else b"".join(parts)})
            return
        with WhileConnected(request):
            for part in parts:
                await _send_part(part, send)
            await send({"type": "http.response.body", "body": b""})

    async def _stream(self, body: AsyncGenerator[bytes, None], start: Event, request: Request, send: Send) -> None:
        try:
            with WhileConnected(request):
                await send(start)
                await _send_part(self.first, send)
                async for part in body:
                    await _send_part(part, send)
                await send({"type": "http.response.body", "body": b""})
        finally:
            await body.aclose()
            if self.close is not None:
                self.close()


async def _send_part(part: bytes | memoryview, send: Send) -> None:
    if len(part) <= PIECE:
        await send({"type": "http.response.body", "body": bytes(part), "more_body": True})
        return
    view = memoryview(part)
    for at in range(0, len(view), PIECE):
        await send({"type": "http.response.body", "body": bytes(view[at : at + PIECE]), "more_body": True})
        await asyncio.sleep(0)  # sending waits only when the connection is full


JSON = b"application/json"


def json_reply(value: Any, status: int = 200, headers: Headers | None = None) -> Reply:
    """A JSON answer."""
    return Reply(orjson.dumps(value), status, JSON, headers or [])
