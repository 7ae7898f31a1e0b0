"""The open sessions of a process, and what is shown of one."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import orjson

from miles_core.errors import Overloaded, SessionNotFound
from miles_core.session.line import Line
from miles_core.session.tree import Node, encoded_spans, path_messages
from miles_core.session.turn import Session
from miles_core.tito import BoundFamily, compare_tokens
from miles_core.tito.rendered import RenderedIds

log = logging.getLogger("miles.session")

CHAT_PATH = b"/v1/chat/completions"

SERVERS_KEYS = frozenset(
    {"tito_session_mismatch", "tools_changed", "rolled_back", "diverged", "control_tokens", "aborted"}
)
"""Metadata that is there where it applies: a creator's own value under such a name would say what is not so."""


def random_id() -> str:
    """An id that cannot be guessed: 32 hex digits."""
    return secrets.token_hex(16)


class SessionStore:
    """Sessions by id; ids are 32 hex digits that cannot be guessed.

    Of several stores that share a limit, each is told how many sessions are open `elsewhere`, and says how many it has.
    """

    def __init__(
        self,
        *,
        max_sessions: int = 0,
        new_id: Callable[[], str] = random_id,
        elsewhere: Callable[[], int] = lambda: 0,
        on_count: Callable[[int], object] = lambda count: None,
    ) -> None:
        self._sessions: dict[str, Session] = {}
        self._max_sessions = max_sessions
        self._new_id = new_id
        self._elsewhere = elsewhere
        self._on_count = on_count

    def __len__(self) -> int:
        return len(self._sessions)

    def create(
        self, *, chat_template_kwargs: Mapping[str, Any], metadata: Mapping[str, Any], with_key: bool = False
    ) -> Session:
        """A new session. Raises Overloaded (429) at the limit."""
        if self._max_sessions and (count := len(self._sessions) + self._elsewhere()) >= self._max_sessions:
            raise Overloaded(
                f"{count} sessions are open, the limit is {self._max_sessions} (--max-sessions)",
                retry_after=5,
            )
        key = secrets.token_urlsafe(24) if with_key else None
        session = Session(self._new_id(), chat_template_kwargs=chat_template_kwargs, metadata=metadata, api_key=key)
        self._sessions[session.id] = session
        self._on_count(len(self._sessions))
        return session

    def get(self, session_id: str) -> Session:
        """The open session of that id. Raises SessionNotFound (404)."""
        session = self._sessions.get(session_id)
        if session is None or session.closed:
            raise SessionNotFound(session_id)
        return session

    def delete(self, session_id: str) -> Session:
        """Close and forget a session. Raises SessionNotFound (404), also the second time."""
        session = self.get(session_id)
        session.closed = True
        del self._sessions[session_id]
        self._on_count(len(self._sessions))
        return session


class SelfCheck:
    """`tito_session_mismatch` of a session's last generation, computed once per generation."""

    def __init__(self, family: BoundFamily) -> None:
        self._family = family
        self._rendered = RenderedIds(family)

    def of(self, session: Session, kwargs: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        """Differences from the template's rendering, or None if the check itself failed (logged)."""
        head = session.forest.last
        if head is None:
            return []
        if session.checked is not None and session.checked[0] == head.seq:
            return session.checked[1]
        try:
            found: list[dict[str, Any]] | None = self._compare(head, kwargs)
        except Exception:
            log.exception("the self-check of session %s failed to run", session.id)
            found = None
        session.checked = (head.seq, found)
        return found

    def _compare(self, head: Node, kwargs: Mapping[str, Any]) -> list[dict[str, Any]]:
        given = head.request.get("chat_template_kwargs") or kwargs
        text = self._family.render(list(path_messages(head)), head.tools, given, False)
        sampled = [(node.prompt_length, node.num_tokens) for node in head.path()]
        ids = head.tokens()
        return compare_tokens(self._family, self._rendered.of(text, ids, encoded_spans(head)), ids, sampled)


def session_metadata(
    session: Session, family: BoundFamily, check: SelfCheck, kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The `metadata` of `GET /sessions/{id}`: the creator's own under the server's keys; the ids as an int32 array."""
    head = session.forest.last
    out: dict[str, Any] = {key: value for key, value in session.metadata.items() if key not in SERVERS_KEYS}
    out["accumulated_token_ids"] = np.frombuffer(head.tokens() if head else b"", dtype=np.int32)
    out["max_trim_tokens"] = family.family.max_trim_tokens
    mismatch = check.of(session, kwargs)
    if mismatch is not None:
        out["tito_session_mismatch"] = mismatch
    if session.tools_changed:
        out["tools_changed"] = True
    if session.rolled_back:
        out["rolled_back"] = session.rolled_back
    if session.diverged:
        out["diverged"] = session.diverged
    if session.control_tokens:
        out["control_tokens"] = session.control_tokens
    if (head.id if head else None) in session.abort_marks:
        out["aborted"] = True
    return out


def records(session: Session, which: str) -> Iterator[bytes]:
    """The session's records as JSON, one at a time; `which` is `all`, `last` or `none`."""
    path = session.forest.last.path() if session.forest.last else []
    shown = {"all": path, "last": path[-1:], "none": []}[which]
    line = Line(path[: len(path) - len(shown)] if shown else ())
    for node in shown:
        line.ask(node)
        yield _record(node, line)
        line.answer(node)


def _record(node: Node, line: Line) -> bytes:
    facts = node.facts
    return b"".join((
        b'{"timestamp":', orjson.dumps(facts.timestamp),
        b',"request_timestamp":', orjson.dumps(facts.request_timestamp),
        b',"method":"POST","path":"', CHAT_PATH, b'","status_code":200,"request":', orjson.dumps(node.request)[:-1],
        b',"messages":[', line.messages, b'],"input_ids":[', line.ids, b']},"response":', node.answer.raw, b"}",
    ))  # fmt: skip
