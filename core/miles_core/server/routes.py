"""What each path of the HTTP API does: read the request, ask the service, write the answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

from miles_core.engine.client import EngineReply
from miles_core.errors import Forbidden, MilesError, Overloaded
from miles_core.server.auth import bearer, require, require_server
from miles_core.server.http import JSON, Headers, Reply, Request, WhileConnected, json_reply
from miles_core.server.service import PASSED_ON, SessionService, TurnOutcome
from miles_core.server.stream import KEEPALIVE, error_event, whole_answer
from miles_core.session.turn import PreparedTurn, Session

log = logging.getLogger("miles.server")

HOP_BY_HOP = frozenset({
    b"server", b"date", b"content-length", b"transfer-encoding", b"content-encoding", b"connection", b"keep-alive",
    b"proxy-authenticate", b"te", b"trailer", b"upgrade",
})  # fmt: skip
"""Headers of the engine that are not copied to the agent."""

HIDDEN_META = ("routed_experts", "indexer_topk")
EVENTS = b"text/event-stream"
WHOLE: Headers = [(b"x-miles-stream", b"whole"), (b"cache-control", b"no-cache")]


def error_body(error: MilesError) -> dict[str, Any]:
    """The JSON of an error; `error` is a string because existing clients of this protocol read it so."""
    return {"error": error.message, "type": error.type, "code": error.status}


def error_reply(error: MilesError) -> Reply:
    """An error as the client gets it."""
    if error.status >= 500:
        log.error("%s: %s", type(error).__name__, error.message)
    headers = [(b"retry-after", b"%d" % error.retry_after)] if isinstance(error, Overloaded) else None
    return json_reply(error_body(error), error.status, headers)


class Routes:
    """The API's paths, and the handler of each."""

    def __init__(self, service: SessionService) -> None:
        self.service = service
        self.settings = service.settings
        self.body_limit = int(self.settings.max_body_mb * 2**20)

    async def answer(self, request: Request) -> Reply:
        """The answer to any request. Raises MilesError for those that are refused."""
        if request.path.startswith("/sessions/") and len(request.path) > len("/sessions/"):
            return await self._below(request, *request.path[len("/sessions/") :].partition("/"))
        if request.path == "/health":
            return self._health() if request.method in ("GET", "HEAD") else _wrong_method(request)
        if request.path in ("/sessions", "/sessions/"):
            return await self._create(request) if request.method == "POST" else _wrong_method(request)
        return _no_such(request, 404, "Not Found", "not_found_error")

    async def _below(self, request: Request, session_id: str, slash: str, path: str) -> Reply:
        """A request below a session."""
        if request.method == "POST":
            if path == "v1/chat/completions":
                return await self._chat(request, session_id)
            if path == "samples":
                return await self._samples(request, session_id)
        if slash:
            return await self._pass_on(request, session_id, path)
        if request.method in ("GET", "HEAD"):
            return await self._show(request, session_id)
        if request.method == "DELETE":
            return self._delete(request, session_id)
        return _wrong_method(request)

    def _session(self, request: Request, session_id: str, *, server_key: bool = False) -> Session:
        """The session the path names, for a caller who may see it."""
        key = self.settings.api_key
        if key is None:
            return self.service.store.get(session_id)
        given = bearer(request.header(b"authorization"))
        if given is None:
            require(key, given)
        session = self.service.store.get(session_id)
        (require_server if server_key else require)(key, given, session)
        return session

    def _health(self) -> Reply:
        """`GET /health`."""
        return json_reply({"status": "ok", "session_server_instance_id": self.service.instance_id})

    async def _create(self, request: Request) -> Reply:
        """`POST /sessions`."""
        require_server(self.settings.api_key, bearer(request.header(b"authorization")))
        session = self.service.create(await request.body(self.body_limit))
        public = self.settings.public_url or request.base_url
        answer = {"session_id": session.id, "base_url": f"{public.rstrip('/')}/sessions/{session.id}"}
        if session.api_key is not None:
            answer["api_key"] = session.api_key
        return json_reply(answer)

    async def _show(self, request: Request, session_id: str) -> Reply:
        """`GET /sessions/{id}`, streamed record by record."""
        session = self._session(request, session_id)
        which = request.parameter("records")
        which = "all" if which is None else which
        if which not in ("all", "last", "none"):
            raise MilesError(f"records={which!r}: expected all, last or none", status=400)
        parts = self.service.show(session, which)
        first = await anext(parts)  # a fault shows before the answer begins
        return Reply(parts, kind=JSON, first=first)

    def _delete(self, request: Request, session_id: str) -> Reply:
        """`DELETE /sessions/{id}`."""
        session = self._session(request, session_id, server_key=True)
        self.service.delete(session.id)
        return Reply(status=204)

    async def _samples(self, request: Request, session_id: str) -> Reply:
        """`POST /sessions/{id}/samples`."""
        session = self._session(request, session_id, server_key=True)
        parts = await self.service.samples(session, await request.body(self.body_limit))
        return Reply(parts, kind=b"application/octet-stream")

    async def _pass_on(self, request: Request, session_id: str, path: str) -> Reply:
        """Any other method and path below a session: to the engine if it is on the allow-list."""
        session = self._session(request, session_id)
        if path not in PASSED_ON:
            raise Forbidden(
                f"/{path} is not open to agents; below a session: v1/chat/completions, {', '.join(sorted(PASSED_ON))}"
            )
        raw = await request.body(self.body_limit)
        with WhileConnected(request):
            reply = await self.service.pass_on(session, request.method, path, request.query, raw, request.headers)
            return passed_through(reply)
        return Reply(status=499)

    # -- turns -------------------------------------------------------------------------------------------------

    async def _chat(self, request: Request, session_id: str) -> Reply:
        """`POST /sessions/{id}/v1/chat/completions`: one turn."""
        session = self._session(request, session_id)
        raw = await request.body(self.body_limit)
        with WhileConnected(request):
            turn = await self.service.prepare(session, raw)
            if turn.stream:
                return await self._streamed(session, turn, request.headers)
            return self._answer(await self.service.run_turn(session, turn, request.headers))
        log.info("session %s: the client hung up; its turn was aborted", session.id)
        return Reply(status=499)

    async def _streamed(self, session: Session, turn: PreparedTurn, headers: Headers) -> Reply:
        """The answer as events; one that is there soon keeps its status, a later one is a stream that is kept alive."""
        task = asyncio.ensure_future(self.service.run_turn(session, turn, headers))
        try:
            await asyncio.wait({task}, timeout=self.settings.keepalive_seconds)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if task.done():
            return self._answer(await task)
        return Reply(self._late(task), kind=EVENTS, headers=WHOLE[:1], close=task.cancel)

    def _answer(self, outcome: TurnOutcome) -> Reply:
        if outcome.refusal is not None:
            return passed_through(outcome.refusal)
        generation, turn = outcome.generation, outcome.turn
        if generation is None:
            raise RuntimeError("a turn without an answer")
        if turn.stream:
            events = b"".join(whole_answer(generation, include_usage=turn.include_usage))
            return Reply(events, kind=EVENTS, headers=WHOLE)
        if any(key in generation.meta for key in HIDDEN_META):
            for key in HIDDEN_META:
                generation.meta.pop(key, None)
            return json_reply(generation.reply)
        return Reply(generation.raw, kind=JSON)

    async def _late(self, task: asyncio.Future[TurnOutcome]) -> AsyncGenerator[bytes, None]:
        """Keep-alive comments until the turn is over, then its events; a fault is an error event."""
        yield KEEPALIVE
        while not task.done():
            await asyncio.wait({task}, timeout=self.settings.keepalive_seconds)
            if not task.done():
                yield KEEPALIVE
        for event in late_events(task):
            yield event


def _wrong_method(request: Request) -> Reply:
    return _no_such(request, 405, "Method Not Allowed", "invalid_request_error")


def _no_such(request: Request, status: int, why: str, kind: str) -> Reply:
    return json_reply({"error": f"{request.method} {request.path}: {why}", "type": kind, "code": status}, status)


def late_events(task: asyncio.Future[TurnOutcome]) -> list[bytes]:
    """The events of a turn that ended after the stream began."""
    error = task.exception()
    if error is not None:
        known = error if isinstance(error, MilesError) else MilesError(f"internal error: {type(error).__name__}")
        if known is not error:
            log.error("a turn failed", exc_info=error)
        return [error_event(error_body(known))]
    outcome = task.result()
    if outcome.refusal is not None:
        text = outcome.refusal.body.decode("utf-8", "replace")
        return [error_event({"error": text, "type": "engine_error", "code": outcome.refusal.status})]
    if outcome.generation is None:
        raise RuntimeError("a turn without an answer")
    return list(whole_answer(outcome.generation, include_usage=outcome.turn.include_usage))


def passed_through(reply: EngineReply) -> Reply:
    """The engine's own answer: status, body and headers, but for those that belong to its connection."""
    kept = [(name.lower(), value) for name, value in reply.headers if name.lower() not in HOP_BY_HOP]
    return Reply(reply.body, reply.status, headers=kept)
