"""One HTTP/1.1 connection to an engine: a request, its answer, whole or as it comes, the next request."""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import httptools

TOGETHER = 2**16
"""Bytes up to which head and body are copied into one write."""
PIECE = 2**20
"""Bytes of a long body that are written at once: the system copies them while nobody else is served."""

Body = bytes | Sequence[bytes]
"""A request's body, whole or in parts."""


def parts_of(body: Body | None) -> Sequence[bytes]:
    """A body in parts; none where there is no body."""
    return () if body is None else (body,) if isinstance(body, bytes) else body


@dataclass(frozen=True, slots=True)
class EngineReply:
    """One whole answer; `headers` as received."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes


class Incoming:
    """An answer whose head is there, and whose body comes in pieces."""

    __slots__ = ("_ended", "_error", "_pieces", "_waiter", "headers", "status")

    def __init__(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.status = status
        self.headers = headers
        self._pieces: deque[bytes] = deque()
        self._ended = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        """Whether the whole body has come."""
        return self._ended and self._error is None

    async def piece(self) -> bytes:
        """The next bytes, as soon as some are there; none at the end. One caller at a time.

        Raises OSError, EOFError or ValueError if it broke off.
        """
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self._ended:
                return b""
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._pieces.popleft()

    async def rest(self) -> bytes:
        """The body from here on."""
        parts = []
        while piece := await self.piece():
            parts.append(piece)
        return b"".join(parts)

    def add(self, data: bytes) -> None:
        """More of the body."""
        self._pieces.append(data)
        self._wake()

    def end(self, error: Exception | None = None) -> None:
        """It is whole, or has broken off."""
        if not self._ended:
            self._ended, self._error = True, error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Connection(asyncio.Protocol):
    """What arrives on one connection, made by `loop.create_connection`; `on_lost` is called when it is closed."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_lost: Callable[[Connection], object]) -> None:
        self.idle_since = 0.0
        self._loop = loop
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[EngineReply] | None = None
        self._opened: asyncio.Future[Incoming] | None = None
        self._incoming: Incoming | None = None
        self._lost: asyncio.Future[None] = loop.create_future()
        self._full = False
        self._room: asyncio.Future[None] | None = None
        """Waited for by a long body: there is room for more of it, or no use for it."""
        self._usable = True
        self._begin()

    def _begin(self, *, bodiless: bool = False) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._parts: list[bytes] = []
        self._encoding = b""
        self._framed = False
        self._bodiless = bodiless

    @property
    def reusable(self) -> bool:
        """Whether it takes another request."""
        return self._usable and self._answer is None and self._opened is None and self._incoming is None

    async def exchange(self, head: bytes, body: Body | None, *, bodiless: bool = False) -> EngineReply:
        """Send a request and wait for its answer; `bodiless` ones end with their headers.

        Raises OSError, EOFError or ValueError if it breaks off or is not HTTP. A cancelled one leaves the connection
        unusable: close it.
        """
        transport = self._ready(bodiless=bodiless)
        answer: asyncio.Future[EngineReply] = self._loop.create_future()
        self._answer = answer
        try:
            if not _write(transport, head, parts_of(body)):
                await self._write_long(transport, head, parts_of(body))
            return await answer
        finally:
            self._answer = None

    async def open(self, head: bytes, body: Body | None) -> Incoming:
        """Send a request and wait for the head of its answer; the body comes as it comes.

        Raises what `exchange` does. The connection takes another request when the body has ended.
        """
        transport = self._ready()
        opened: asyncio.Future[Incoming] = self._loop.create_future()
        self._opened = opened
        try:
            if not _write(transport, head, parts_of(body)):
                await self._write_long(transport, head, parts_of(body))
            return await opened
        finally:
            self._opened = None

    async def _write_long(self, transport: asyncio.Transport, head: bytes, parts: Sequence[bytes]) -> None:
        """Write piece by piece, as there is room; an answer that does not wait for the rest ends it."""
        transport.write(head)
        for part in parts:
            for at in range(0, len(part), PIECE):
                if self._answered:
                    self.close()
                    return
                transport.write(part[at : at + PIECE])
                if self._full:
                    self._room = self._loop.create_future()
                    await self._room
                else:
                    await asyncio.sleep(0)

    @property
    def _answered(self) -> bool:
        """Whether nothing more is to come of what was asked."""
        waiting = self._answer or self._opened
        return self._incoming is None and (waiting is None or waiting.done())

    def _ready(self, *, bodiless: bool = False) -> asyncio.Transport:
        if self._transport is None or not self.reusable:
            raise EOFError("the connection is closed")
        self._begin(bodiless=bodiless)
        return self._transport

    def close(self) -> None:
        """Close it, whatever it is doing."""
        self._usable = False
        if self._transport is not None:
            self._transport.abort()

    async def closed(self) -> None:
        """Return when it is closed."""
        await asyncio.wait([self._lost])

    # -- asyncio's calls ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are of no such class

    def pause_writing(self) -> None:
        """No room for more."""
        self._full = True

    def resume_writing(self) -> None:
        """There is room again."""
        self._full = False
        self._go_on()

    def _go_on(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def data_received(self, data: bytes) -> None:
        """Some of an answer."""
        if self._answer is None and self._opened is None and self._incoming is None:  # nobody asked
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._usable = False
            self._fail(ValueError(f"the answer is not HTTP: {error}"))

    def eof_received(self) -> None:
        """Nothing more comes: nobody waits until the rest of a long body is read."""
        self.close()

    def connection_lost(self, error: Exception | None) -> None:
        """It is closed; an answer that did not say its length is whole now."""
        self._usable = False
        self._lost.set_result(None)
        self._on_lost(self)
        if error is None and self._headers and not self._framed and self._parser.get_status_code() >= 200:
            self._complete()
        self._fail(error if isinstance(error, OSError) else EOFError("the connection was closed before the answer"))

    # -- the parser's calls ------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        lower = name.lower()
        if lower in (b"content-length", b"transfer-encoding"):
            self._framed = True
        elif lower == b"content-encoding":
            self._encoding = value.lower()
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """All headers."""
        if self._bodiless:
            self._usable = False  # the parser waits for a body that does not come
            self._complete()
        elif self._opened is not None and self._parser.get_status_code() >= 200:
            self._incoming = Incoming(self._parser.get_status_code(), self._headers)
            if self._encoding not in (b"", b"identity"):
                self._usable = False
                self._fail(ValueError(f"the answer is {self._encoding.decode('latin-1')}, which was not asked for"))
            elif not self._opened.done():
                self._opened.set_result(self._incoming)

    def on_body(self, data: bytes) -> None:
        """Some of the body."""
        if self._incoming is not None:
            self._incoming.add(data)
        else:
            self._parts.append(data)

    def on_message_complete(self) -> None:
        """The whole answer, or one of those that only announce it (100 Continue)."""
        if self._parser.get_status_code() < 200:
            self._headers.clear()
            return
        self._usable = self._usable and self._parser.should_keep_alive()
        self._complete()

    def _complete(self) -> None:
        self._go_on()
        if self._incoming is not None:
            self._incoming.end()
            self._incoming = None
            return
        body = b"".join(self._parts)
        if self._encoding in (b"gzip", b"deflate"):
            try:
                body = zlib.decompress(body, zlib.MAX_WBITS | 32)
            except zlib.error as error:
                self._fail(ValueError(f"the answer's {self._encoding.decode()} is damaged: {error}"))
                return
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(EngineReply(self._parser.get_status_code(), self._headers, body))

    def _fail(self, error: Exception) -> None:
        self._go_on()
        for waiting in (self._answer, self._opened):
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)
        if self._incoming is not None:
            self._incoming.end(error)


def _write(transport: asyncio.Transport, head: bytes, parts: Sequence[bytes]) -> bool:
    """Write a request in one go, unless it is long."""
    size = sum(map(len, parts))
    if size <= TOGETHER:
        transport.write(b"".join((head, *parts)))
    elif size <= PIECE:
        transport.writelines((head, *parts))
    return size <= PIECE
