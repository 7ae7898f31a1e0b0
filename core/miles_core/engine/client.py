"""Talking to an engine over SGLang's HTTP protocol."""

from __future__ import annotations

import asyncio
import base64
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import SplitResult, urlsplit

import orjson

from miles_core.engine.connection import Body, Connection, EngineReply, Incoming, parts_of
from miles_core.errors import EngineUnreachable

KEEPALIVE_SECONDS = 4
"""Below uvicorn's 5 s, so that a pooled connection is not one that the engine is just closing."""

__all__ = ["EngineClient", "EngineReply", "EngineStream"]


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


@contextmanager
def _naming(url: str) -> Iterator[None]:
    """What breaks inside is EngineUnreachable, and names the URL."""
    try:
        yield
    except (OSError, ValueError, EOFError) as error:
        reason = str(error) or type(error).__name__
        raise EngineUnreachable(f"the engine at {url} could not be reached or broke off: {reason}") from error


class EngineStream:
    """An answer that is read as it comes."""

    def __init__(
        self, client: EngineClient, place: _Place, connection: Connection, url: str, incoming: Incoming
    ) -> None:
        self.status = incoming.status
        self.headers = incoming.headers
        self._client, self._place, self._connection, self._url = client, place, connection, url
        self._incoming = incoming

    def header(self, name: bytes) -> bytes | None:
        """The first header of that name (in lower case)."""
        return next((value for key, value in self.headers if key.lower() == name), None)

    async def piece(self) -> bytes:
        """The next bytes of the body; none at its end. Raises EngineUnreachable if it broke off."""
        with _naming(self._url):
            return await self._incoming.piece()

    async def whole(self) -> EngineReply:
        """The answer with the rest of its body."""
        with _naming(self._url):
            return EngineReply(self.status, self.headers, await self._incoming.rest())

    def close(self) -> None:
        """No more of it is wanted: a connection that is not at the answer's end is closed."""
        if self._incoming.ended:
            self._client.keep(self._place, self._connection)
        else:
            self._connection.close()


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
        self, method: str, url: str, *, body: Body | None = None, headers: Mapping[str, str] | None = None
    ) -> EngineReply:
        """Send and read one whole answer, whatever its status. Raises EngineUnreachable naming the URL."""
        with _naming(url):
            if self._timeout is None:
                return await self._exchange(method, url, body, headers)
            async with asyncio.timeout(self._timeout):
                return await self._exchange(method, url, body, headers)

    async def stream(self, url: str, *, body: Body, headers: Mapping[str, str] | None = None) -> EngineStream:
        """POST and read the head of the answer, whatever its status; call `close` on what comes.

        Raises EngineUnreachable naming the URL.
        """
        with _naming(url):
            place, head = self._head_of("POST", url, body, headers)
            connection = self._kept(place) or await self._connect(place)
            try:
                return EngineStream(self, place, connection, url, await connection.open(head, body))
            except BaseException:
                connection.close()
                raise

    async def _exchange(
        self, method: str, url: str, body: Body | None, headers: Mapping[str, str] | None
    ) -> EngineReply:
        place, head = self._head_of(method, url, body, headers)
        connection = self._kept(place) or await self._connect(place)
        try:
            reply = await connection.exchange(head, body, bodiless=method == "HEAD")
        except BaseException:
            connection.close()
            raise
        self.keep(place, connection)
        return reply

    def _head_of(
        self, method: str, url: str, body: Body | None, headers: Mapping[str, str] | None
    ) -> tuple[_Place, bytes]:
        parts = urlsplit(url)
        place = _Place.of(parts.scheme, parts.netloc)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        lines = "".join([f"{name}: {value}\r\n" for name, value in (headers or {}).items()]).encode("latin-1")
        length = b"" if body is None else b"Content-Length: %d\r\n" % sum(map(len, parts_of(body)))
        line = b"%s %s HTTP/1.1\r\n" % (method.encode(), path.encode())
        return place, b"".join((line, place.head, self._head, lines, length, b"\r\n"))

    def keep(self, place: _Place, connection: Connection) -> None:
        """A connection whose answer is whole takes the next request, if it can."""
        if connection.reusable:
            connection.idle_since = time.monotonic()
            self._idle.setdefault(place, []).append(connection)

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
