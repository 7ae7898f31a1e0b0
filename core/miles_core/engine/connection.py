"""One HTTP/1.1 connection to an engine: a request, its whole answer, the next request."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import httptools

TOGETHER = 2**16
"""Bytes up to which head and body are copied into one write."""


@dataclass(frozen=True, slots=True)
class EngineReply:
    """One whole answer; `headers` as received."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes


class Connection(asyncio.Protocol):
    """What arrives on one connection, made by `loop.create_connection`; `on_lost` is called when it is closed."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_lost: Callable[[Connection], object]) -> None:
        self.idle_since = 0.0
        self._loop = loop
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[EngineReply] | None = None
        self._lost: asyncio.Future[None] = loop.create_future()
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
        return self._usable and self._answer is None

    async def exchange(self, head: bytes, body: bytes | None, *, bodiless: bool = False) -> EngineReply:
        """Send a request and wait for its answer; `bodiless` ones end with their headers.

        Raises OSError, EOFError or ValueError if it breaks off or is not HTTP. A cancelled one leaves the connection
        unusable: close it.
        """
        if self._transport is None or not self.reusable:
            raise EOFError("the connection is closed")
        self._begin(bodiless=bodiless)
        answer: asyncio.Future[EngineReply] = self._loop.create_future()
        self._answer = answer
        if body is None or len(body) <= TOGETHER:
            self._transport.write(head + (body or b""))
        else:
            self._transport.writelines((head, body))
        try:
            return await answer
        finally:
            self._answer = None

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

    def data_received(self, data: bytes) -> None:
        """Some of an answer."""
        if self._answer is None:  # nobody asked
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._usable = False
            self._fail(ValueError(f"the answer is not HTTP: {error}"))

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

    def on_body(self, data: bytes) -> None:
        """Some of the body."""
        self._parts.append(data)

    def on_message_complete(self) -> None:
        """The whole answer, or one of those that only announce it (100 Continue)."""
        if self._parser.get_status_code() < 200:
            self._headers.clear()
            return
        self._usable = self._usable and self._parser.should_keep_alive()
        self._complete()

    def _complete(self) -> None:
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
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
