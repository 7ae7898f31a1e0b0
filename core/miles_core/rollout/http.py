"""JSON over HTTP with retries, as generate functions call engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from miles_core.errors import EngineError, EngineReplyError, EngineUnreachable

if TYPE_CHECKING:
    import aiohttp

FIRST_DELAY, LONGEST_DELAY = 0.1, 2.0
"""Seconds before a request is tried again; it doubles each time."""

HEALTH_TIMEOUT = 20.0
"""Seconds that a look at an engine may take; SGLang answers when the next token comes, and itself waits as long."""

MAX_TEXT = 2000
"""Characters of an error's body that a message shows."""


async def post(
    url: str,
    payload: Any,
    max_retries: int = 60,
    action: str = "post",
    headers: Mapping[str, str] | None = None,
    *,
    http: aiohttp.ClientSession | None = None,
) -> Any:
    """Send `payload` as JSON and return the decoded answer; transport errors and 5xx are tried again.

    `action` is the HTTP method. `http` is a client to use, else one is made for this request. Raises EngineError with
    the status and the text of another answer than 2xx, or EngineUnreachable.
    """
    tries = max(max_retries, 0) + 1
    delay = FIRST_DELAY
    async with client(http) as session:
        for last in (number == tries for number in range(1, tries + 1)):
            try:
                return await once(session, action, url, payload, headers)
            except EngineError as error:
                if last or not may_retry(error):
                    raise
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY)
    raise AssertionError("the last try returns or raises")


async def get(url: str, *, http: aiohttp.ClientSession | None = None) -> Any:
    """The decoded JSON answer of a GET request, with the retries of `post`."""
    return await post(url, None, action="get", http=http)


def may_retry(error: EngineError) -> bool:
    """Whether the same request may well succeed later: no connection, or a fault of the server."""
    return isinstance(error, EngineUnreachable) or (error.status >= 500 and not isinstance(error, EngineReplyError))


async def is_up(look: Awaitable[object]) -> bool:
    """Whether a request, made to see how an engine is, finds one; an odd answer is one, too."""
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT):
            await look
    except EngineError as error:
        return not may_retry(error)
    except TimeoutError:
        return False
    return True


async def once(
    session: aiohttp.ClientSession, action: str, url: str, payload: Any, headers: Mapping[str, str] | None = None
) -> Any:
    """One request; what it raises are EngineErrors, with the HTTP status where there was an answer."""
    import aiohttp

    body = {} if payload is None else {"json": payload}
    what = f"{action.upper()} {url}"
    try:
        async with session.request(action.upper(), url, headers=dict(headers or {}), **body) as response:
            content = await response.read()
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise EngineUnreachable(f"{what}: {str(error) or type(error).__name__}") from error
    if not 200 <= response.status < 300:
        raise EngineError(f"{what}: {response.status}: {said(content)}", status=response.status)
    try:
        return json.loads(content) if content else None
    except (ValueError, RecursionError) as error:
        raise EngineReplyError(f"{what}: the answer is not JSON: {error}") from error


def said(content: bytes) -> str:
    """The text of an error's body: its message, where it is JSON with one."""
    text = content[:MAX_TEXT].decode("utf-8", "replace")
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return text
    error = found.get("error", found) if isinstance(found, dict) else found
    return str(error.get("message", error) if isinstance(error, dict) else error)[:MAX_TEXT]


@asynccontextmanager
async def client(shared: aiohttp.ClientSession | None) -> AsyncIterator[aiohttp.ClientSession]:
    """The shared client, or one of our own for as long as it is needed."""
    if shared is not None and not shared.closed:
        yield shared
        return
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(timeout=timeout) as own:
        yield own
