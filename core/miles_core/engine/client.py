"""Talking to an engine over SGLang's HTTP protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp
import orjson
from aiohttp.abc import AbstractStreamWriter

from miles_core.errors import EngineUnreachable

KEEPALIVE_SECONDS = 4
"""Below uvicorn's 5 s, so that a pooled connection is not one that the engine is just closing."""


@dataclass(frozen=True)
class EngineReply:
    """One whole answer; `headers` as received."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes


class _Whole(aiohttp.Payload):
    """A body that is in memory already: given to the connection at once, whatever its size (aiohttp warns of bytes)."""

    _value: bytes

    def __init__(self, value: bytes) -> None:
        super().__init__(value, content_type="application/json")
        self._size = len(value)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Its text, for messages of aiohttp's."""
        return self._value.decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Send it."""
        await writer.write(self._value)


class EngineClient:
    """Requests to engine workers; create and close it inside a running event loop."""

    def __init__(
        self, *, api_key: str | None = None, timeout: float | None = None, connect_timeout: float = 10.0
    ) -> None:
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),  # an engine's cookies are nobody's, and jars are searched every time
            timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=connect_timeout),
        )

    async def request(
        self, method: str, url: str, *, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> EngineReply:
        """Send and read one whole answer, whatever its status. Raises EngineUnreachable naming the URL."""
        try:
            async with self._http.request(
                method,
                url,
                data=None if body is None else _Whole(body),
                headers={**(headers or {}), **self._headers},
                allow_redirects=False,
            ) as response:
                content = await response.read()
                return EngineReply(response.status, response.raw_headers, content)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise EngineUnreachable(f"the engine at {url} could not be reached or broke off: {reason}") from error

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
        await self._http.close()
