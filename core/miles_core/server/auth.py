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
    own = session.api_key if session is not None else None
    if same_key(given, api_key) or (own is not None and same_key(given, own)):
        return
    raise Unauthorized("the API key is not the server's" + (" nor this session's" if session else ""))


def require_server(api_key: str | None, given: str | None, session: Session | None = None) -> None:
    """Let the server's key pass alone. A session's own key is Forbidden (403) here, any other is 401."""
    if api_key is None:
        return
    if session is not None and given is not None and session.api_key is not None and same_key(given, session.api_key):
        raise Forbidden("a session's own key opens its turns alone; this takes the server's key")
    require(api_key, given)


def same_key(left: str, right: str) -> bool:
    """Whether two keys are one, in a time that does not tell how much of them is."""
    return hmac.compare_digest(left.encode("utf-8"), right.encode("utf-8"))
