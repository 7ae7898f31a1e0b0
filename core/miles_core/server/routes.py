"""What each path of the HTTP API does: read the request, ask the service, write the answer."""

from __future__ import annotations

import logging

from miles_core.engine.client import EngineReply
from miles_core.errors import Forbidden, RequestError
from miles_core.server import metrics
from miles_core.server.admin import Admin
from miles_core.server.answers import passed_through
from miles_core.server.auth import bearer, require, require_server, same_key
from miles_core.server.http import JSON, Reply, Request, WhileConnected, json_reply
from miles_core.server.live import StreamedTurn
from miles_core.server.service import PASSED_ON, SessionService
from miles_core.session.reply import Generation
from miles_core.session.turn import Session

log = logging.getLogger("miles.server")

HIDDEN_META = ("routed_experts", "indexer_topk")


class Routes:
    """The API's paths, and the handler of each."""

    def __init__(self, service: SessionService) -> None:
        self.service = service
        self.settings = service.settings
        self.admin = Admin(service)
        self.body_limit = int(self.settings.max_body_mb * 2**20)

    async def answer(self, request: Request) -> Reply:
        """The answer to any request. Raises MilesError for those that are refused."""
        if request.path.startswith("/sessions/") and len(request.path) > len("/sessions/"):
            return await self._below(request, *request.path[len("/sessions/") :].partition("/"))
        if request.path == "/health":
            return self._health() if request.method in ("GET", "HEAD") else _wrong_method(request)
        if request.path in ("/sessions", "/sessions/"):
            return await self._create(request) if request.method == "POST" else _wrong_method(request)
        if request.path.startswith("/admin/"):
            return await self.admin.answer(request, self.body_limit)
        if request.path == "/metrics":
            return await self._metrics(request) if request.method in ("GET", "HEAD") else _wrong_method(request)
        why = "Not Found; turns are taken below the base_url that POST /sessions gives"
        return _no_such(request, 404, why, "not_found_error")

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

    async def _metrics(self, request: Request) -> Reply:
        """`GET /metrics`: this process', or between processes its numbers as JSON."""
        if request.internal:
            return json_reply(self.service.own_measured())
        self._require_operator(bearer(request.header(b"authorization")))
        return Reply(await self.service.all_measured(), kind=metrics.TEXT)

    def _require_operator(self, given: str | None) -> None:
        """Let the server's key and the admin key pass, where agents need a key."""
        admin = self.settings.admin_api_key
        if admin is None or given is None or not same_key(given, admin):
            require_server(self.settings.api_key, given)

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
            raise RequestError(f"records={which!r}: expected all, last or none")
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
                f"{request.method} /{path} is not open to agents; below a session: POST v1/chat/completions, "
                f"POST samples, {', '.join(sorted(PASSED_ON))}"
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
                return await StreamedTurn(self.service, session, turn, request.headers).reply()
            return _answer(await self.service.run_turn(session, turn, request.headers))
        log.info("session %s: the client hung up; its turn was aborted", session.id)
        return Reply(status=499)


def _answer(found: EngineReply | Generation) -> Reply:
    if isinstance(found, EngineReply):
        return passed_through(found)
    if any(key in found.meta for key in HIDDEN_META):
        for key in HIDDEN_META:
            found.meta.pop(key, None)
        return json_reply(found.reply)
    return Reply(found.raw, kind=JSON)


def _wrong_method(request: Request) -> Reply:
    return _no_such(request, 405, "Method Not Allowed", "invalid_request_error")


def _no_such(request: Request, status: int, why: str, kind: str) -> Reply:
    return json_reply({"error": f"{request.method} {request.path}: {why}", "type": kind, "code": status}, status)
