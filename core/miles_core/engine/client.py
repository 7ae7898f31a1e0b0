"""Talking to an engine over SGLang's HTTP protocol."""

from __future__ import annotations

import asyncio
import base64
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import SplitResult, urlsplit

import orjson

from miles_core.engine.connection import Connection, EngineReply
from miles_core.errors import EngineUnreachable

KEEPALIVE_SECONDS = 4
"""Below uvicorn's 5 s, so that a pooled connection is not one that the engine is just closing."""

__all__ = ["EngineClient", "EngineReply"]


@dataclass(frozen=True)
class _Place:
    """Where requests to one engine go."""

    host: str
    port: int
    secure: bool
    head: bytes
    """The header lines that every request there has."""

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, scheme: str, netloc: str) -> _Place:
        """From the parts of a URL. Raises ValueError for a port that is none."""
        url = SplitResult(scheme, netloc, "", "", "")
        lines = f"Host: {netloc.rpartition('@')[2]}\r\nAccept-Encoding: identity\r\n"
        if url.username is not None:
            key = base64.b64encode(f"{url.username}:{url.password or ''}".encode()).decode()
            lines += f"Authorization: Basic {key}\r\n"
        secure = scheme == "https"
        return cls(url.hostname or "", url.port or (443 if secure else 80), secure, lines.encode("latin-1"))


class EngineClient:
    """Requests to engine workers, over connections that are kept; lives in one event loop.

    A client of its own, because general ones take several times as long, and this is half of what a turn costs.
    `timeout` is in seconds for one whole request, None for none.
    """

    def __init__(
        self, *, api_key: str | None = None, timeout: float | None = None, connect_timeout: float = 10.0
    ) -> None:
        self._head = f"Authorization: Bearer {api_key}\r\n".encode("latin-1") if api_key else b""
        self._timeout = timeout
        self._connect_timeout = connect_timeout
        self._idle: dict[_Place, list[Connection]] = {}
        self._open: set[Connection] = set()
        self._trusted: ssl.SSLContext | None = None

    async def request(
        self, method: str, url: str, *, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> EngineReply:
        """Send and read one whole answer, whatever its status. Raises EngineUnreachable naming the URL."""
        try:
            if self._timeout is None:
                return await self._exchange(method, url, body, headers)
            async with asyncio.timeout(self._timeout):
                return await self._exchange(method, url, body, headers)
        except (OSError, ValueError, EOFError) as error:
            reason = str(error) or type(error).__name__
            raise EngineUnreachable(f"the engine at {url} could not be reached or broke off: {reason}") from error

    async def _exchange(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str] | None
    ) -> EngineReply:
        parts = urlsplit(url)
        place = _Place.of(parts.scheme, parts.netloc)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        lines = "".join([f"{name}: {value}\r\n" for name, value in (headers or {}).items()]).encode("latin-1")
        length = b"" if body is None else b"Content-Length: %d\r\n" % len(body)
        head = b"%s %s HTTP/1.1\r\n" % (method.encode(), path.encode())
        connection = self._kept(place) or await self._connect(place)
        try:
            reply = await connection.exchange(
                b"".join((head, place.head, self._head, lines, length, b"\r\n")), body, bodiless=method == "HEAD"
            )
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            connection.idle_since = time.monotonic()
            self._idle.setdefault(place, []).append(connection)
        return reply

    def _kept(self, place: _Place) -> Connection | None:
        """An open connection that was used not long ago."""
        idle = self._idle.get(place)
        while idle:
            connection = idle.pop()
            if connection.reusable and time.monotonic() - connection.idle_since < KEEPALIVE_SECONDS:
                return connection
            connection.close()
        return None

    async def _connect(self, place: _Place) -> Connection:
        if place.secure and self._trusted is None:
            self._trusted = ssl.create_default_context()
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._connect_timeout):
            _, connection = await loop.create_connection(
                lambda: Connection(loop, self._open.discard),
                place.host,
                place.port,
                ssl=self._trusted if place.secure else None,
            )
        self._open.add(connection)
        return connection

    async def abort(self, worker: str, rid: str) -> None:
        """Ask a worker to stop a request; best effort, since the request may be over already."""
        try:
            await self.request(
                "POST",
                f"{worker}/abort_request",
                body=orjson.dumps({"rid": rid}),
                headers={"Content-Type": "application/json"},
            )
        except EngineUnreachable:
            return

    async def close(self) -> None:
        """Close every connection."""
        still_open = list(self._open)
        for connection in still_open:
            connection.close()
        await asyncio.gather(*(connection.closed() for connection in still_open))
