"""Who may do what, where keys are configured."""

from __future__ import annotations

import hmac

from miles_core.errors import Forbidden, Unauthorized
from miles_core.session.turn import Session


def bearer(header: str | None) -> str | None:
    """The key of an `Authorization: Bearer …` header."""
    scheme, _, key = (header or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" and key.strip() else None


def require(api_key: str | None, given: str | None, session: Session | None = None) -> None:
    """Let the server's key pass, and for a session its own. Raises Unauthorized (401) or Forbidden (403)."""
    if api_key is None:
        return
    if given is None:
        raise Unauthorized("this server wants an API key: send it as 'Authorization: Bearer <key>'")
    if _same(given, api_key) or (session is not None and session.api_key is not None and _same(given, session.api_key)):
        return
    raise Unauthorized("the API key is not the server's" + (" nor this session's" if session else ""))


def require_server(api_key: str | None, given: str | None, session: Session | None = None) -> None:
    """Let the server's key pass alone. A session's own key is Forbidden (403) here, any other is 401."""
    if api_key is None:
        return
    if session is not None and given is not None and session.api_key is not None and _same(given, session.api_key):
        raise Forbidden("a session's own key opens its turns alone; this takes the server's key")
    require(api_key, given)


def _same(left: str, right: str) -> bool:
    return hmac.compare_digest(left.encode("utf-8"), right.encode("utf-8"))
