"""What errors, and the engine's own answers, look like to a client."""

from __future__ import annotations

import logging
from typing import Any

from miles_core.engine.client import EngineReply
from miles_core.errors import MilesError, Overloaded
from miles_core.server.http import Reply, json_reply

log = logging.getLogger("miles.server")

HOP_BY_HOP = frozenset({
    b"server", b"date", b"content-length", b"transfer-encoding", b"content-encoding", b"connection", b"keep-alive",
    b"proxy-authenticate", b"te", b"trailer", b"upgrade",
})  # fmt: skip
"""Headers of the engine that are not copied to the agent."""


def error_body(error: MilesError) -> dict[str, Any]:
    """The JSON of an error; `error` is a string because existing clients of this protocol read it so."""
    return {"error": error.message, "type": error.type, "code": error.status}


def error_reply(error: MilesError) -> Reply:
    """An error as the client gets it."""
    if error.status >= 500:
        log.error("%s: %s", type(error).__name__, error.message)
    headers = [(b"retry-after", b"%d" % error.retry_after)] if isinstance(error, Overloaded) else None
    return json_reply(error_body(error), error.status, headers)


def late_error(error: BaseException) -> dict[str, Any]:
    """The JSON of an error after the answer began, which is logged here."""
    if isinstance(error, MilesError):
        log.error("%s: %s", type(error).__name__, error.message)
        return error_body(error)
    log.error("a turn failed", exc_info=error)
    return error_body(MilesError(f"internal error: {type(error).__name__}"))


def passed_through(reply: EngineReply) -> Reply:
    """The engine's own answer: status, body and headers, but for those that belong to its connection."""
    kept = [(name.lower(), value) for name, value in reply.headers if name.lower() not in HOP_BY_HOP]
    return Reply(reply.body, reply.status, headers=kept)
