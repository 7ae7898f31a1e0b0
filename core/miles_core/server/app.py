"""The HTTP face of the session server: routes, errors as JSON, and running it."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any

import orjson
import uvicorn
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from miles_core.engine.client import EngineReply
from miles_core.errors import BodyTooLarge, ConfigError, Forbidden, MilesError, Overloaded
from miles_core.plugins import Registry
from miles_core.server.auth import bearer, require, require_server
from miles_core.server.service import PASSED_ON, Parts, SessionService, TurnOutcome, load_parts
from miles_core.server.settings import ServerSettings
from miles_core.server.stream import KEEPALIVE, error_event, whole_answer
from miles_core.session.store import records
from miles_core.session.turn import PreparedTurn, Session

log = logging.getLogger("miles.server")

HOP_BY_HOP = frozenset({
    "server", "date", "content-length", "transfer-encoding", "content-encoding", "connection", "keep-alive",
    "proxy-authenticate", "te", "trailer", "upgrade",
})  # fmt: skip
"""Headers of the engine that are not copied to the agent."""

BACKLOG = 4096
"""Connections that wait to be accepted."""

HIDDEN_META = ("routed_experts", "indexer_topk")


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(orjson.dumps(body), status, headers, "application/json")


def error_body(error: MilesError) -> dict[str, Any]:
    """The JSON of an error; `error` is a string because existing clients of this protocol read it so."""
    return {"error": error.message, "type": error.type, "code": error.status}


def error_response(error: MilesError) -> Response:
    """An error as the client gets it."""
    if error.status >= 500:
        log.error("%s: %s", type(error).__name__, error.message)
    headers = {"Retry-After": str(error.retry_after)} if isinstance(error, Overloaded) else None
    return json_response(error_body(error), error.status, headers)


async def read_body(request: Request, limit: int) -> bytes:
    """The request's body. Raises BodyTooLarge (413), as early as its length is known."""
    text = f"the request body is over the limit of {limit / 2**20:.3g} MB (--max-body-mb)"
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise BodyTooLarge(text)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise BodyTooLarge(text)
    return bytes(body)


class Routes:
    """The handlers; each reads the request, asks the service, writes the answer."""

    def __init__(self, service: SessionService) -> None:
        self.service = service
        self.settings = service.settings
        self.body_limit = int(self.settings.max_body_mb * 2**20)

    def _session(self, request: Request, *, server_key: bool = False) -> Session:
        """The session the path names, for a caller who may see it."""
        key = self.settings.api_key
        given = bearer(request.headers.get("authorization"))
        if key is not None and given is None:
            require(key, given)
        session = self.service.store.get(request.path_params["session_id"])
        (require_server if server_key else require)(key, given, session)
        return session

    async def health(self, request: Request) -> Response:
        """`GET /health`."""
        return json_response({"status": "ok", "session_server_instance_id": self.service.instance_id})

    async def create(self, request: Request) -> Response:
        """`POST /sessions`."""
        require_server(self.settings.api_key, bearer(request.headers.get("authorization")))
        session = self.service.create(await read_body(request, self.body_limit))
        public = self.settings.public_url or str(request.base_url)
        answer = {"session_id": session.id, "base_url": f"{public.rstrip('/')}/sessions/{session.id}"}
        if session.api_key is not None:
            answer["api_key"] = session.api_key
        return json_response(answer)

    async def show(self, request: Request) -> Response:
        """`GET /sessions/{id}`, streamed record by record."""
        session = self._session(request)
        which = request.query_params.get("records", "all")
        if which not in ("all", "last", "none"):
            return error_response(MilesError(f"records={which!r}: expected all, last or none", status=400))
        metadata = orjson.dumps(self.service.metadata(session))
        rows = records(session, which)

        async def body() -> AsyncIterator[bytes]:
            yield b'{"session_id":' + orjson.dumps(session.id) + b',"records":['
            for number, row in enumerate(rows):
                yield (b"," if number else b"") + row
                await asyncio.sleep(0)
            yield b'],"metadata":' + metadata + b"}"

        return StreamingResponse(body(), media_type="application/json")

    async def delete(self, request: Request) -> Response:
        """`DELETE /sessions/{id}`."""
        session = self._session(request, server_key=True)
        self.service.delete(session.id)
        return Response(status_code=204)

    async def samples(self, request: Request) -> Response:
        """`POST /sessions/{id}/samples`."""
        session = self._session(request, server_key=True)
        payload = self.service.samples(session, await read_body(request, self.body_limit))
        return Response(payload, media_type="application/octet-stream")

    async def chat(self, request: Request) -> Response:
        """`POST /sessions/{id}/v1/chat/completions`: one turn."""
        session = self._session(request)
        raw = await read_body(request, self.body_limit)
        turn = self.service.prepare(session, raw)
        task = asyncio.ensure_future(self.service.run_turn(session, turn, dict(request.headers)))
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            wait = self.settings.keepalive_seconds if turn.stream else None
            await asyncio.wait({task, gone}, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and not gone.done():
                return _TurnStream(
                    self._late(task), media_type="text/event-stream", headers={"x-miles-stream": "whole"}, turn=task
                )
        except asyncio.CancelledError:
            task.cancel()
            raise
        finally:
            hung_up = gone.done() and not task.done()
            if hung_up:
                task.cancel()
            gone.cancel()
        if hung_up:
            log.info("session %s: the client hung up; its turn was aborted", session.id)
            return Response(status_code=499)
        return self._answer(await task, turn)

    def _answer(self, outcome: TurnOutcome, turn: PreparedTurn) -> Response:
        if outcome.refusal is not None:
            return passed_through(outcome.refusal)
        generation = outcome.generation
        if generation is None:
            raise RuntimeError("a turn without an answer")
        if turn.stream:
            events = b"".join(whole_answer(generation, include_usage=turn.include_usage))
            return Response(
                events,
                media_type="text/event-stream",
                headers={"x-miles-stream": "whole", "cache-control": "no-cache"},
            )
        if any(key in generation.meta for key in HIDDEN_META):
            for key in HIDDEN_META:
                generation.meta.pop(key, None)
            return json_response(generation.reply)
        return Response(generation.raw, media_type="application/json")

    async def _late(self, task: asyncio.Future[TurnOutcome]) -> AsyncIterator[bytes]:
        """Keep-alive comments until the turn is over, then its events; a fault is an error event."""
        yield KEEPALIVE
        while not task.done():
            await asyncio.wait({task}, timeout=self.settings.keepalive_seconds)
            if not task.done():
                yield KEEPALIVE
        for event in late_events(task):
            yield event

    async def pass_on(self, request: Request) -> Response:
        """Any other method and path below a session: to the engine if it is on the allow-list."""
        session = self._session(request)
        path = request.path_params["path"]
        if path not in PASSED_ON:
            raise Forbidden(
                f"/{path} is not open to agents; below a session: v1/chat/completions, {', '.join(sorted(PASSED_ON))}"
            )
        raw = await read_body(request, self.body_limit)
        reply = await self.service.pass_on(session, request.method, path, request.url.query, raw, dict(request.headers))
        return passed_through(reply)


class _TurnStream(StreamingResponse):
    """An event stream that ends its turn when the client leaves, also before the first event was pulled."""

    def __init__(self, *args: Any, turn: asyncio.Future[TurnOutcome], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._turn = turn

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._turn.cancel()


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


async def _disconnected(request: Request) -> None:
    """Return when the client has hung up; call after the body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def passed_through(reply: EngineReply) -> Response:
    """The engine's own answer: status, body and headers, but for those that belong to its connection."""
    headers = {name: value for name, value in reply.headers.items() if name not in HOP_BY_HOP}
    return Response(reply.body, reply.status, headers)


def build_app(service: SessionService, *, on_start: Callable[[], object] | None = None) -> FastAPI:
    """The ASGI application of a service; `on_start` is called when the server's event loop is up."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        if on_start is not None:
            on_start()
        yield
        await service.stop()

    app = FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    routes = Routes(service)
    add: Callable[..., None] = app.router.add_route
    add("/health", routes.health, methods=["GET"])
    add("/sessions", routes.create, methods=["POST"])
    add("/sessions/{session_id}", routes.show, methods=["GET"])
    add("/sessions/{session_id}", routes.delete, methods=["DELETE"])
    add("/sessions/{session_id}/samples", routes.samples, methods=["POST"])
    add("/sessions/{session_id}/v1/chat/completions", routes.chat, methods=["POST"])
    every = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]
    add("/sessions/{session_id}/{path:path}", routes.pass_on, methods=every)
    app.add_exception_handler(MilesError, _on_miles_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)
    return app


async def _on_miles_error(request: Request, error: Exception) -> Response:
    return error_response(error if isinstance(error, MilesError) else MilesError(str(error)))


async def _on_http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    text = f"{request.method} {request.url.path}: {getattr(error, 'detail', error)}"
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    return json_response({"error": text, "type": kind, "code": status}, status)


async def _on_bug(request: Request, error: Exception) -> Response:
    return json_response({"error": f"internal error: {type(error).__name__}", "type": "server_error", "code": 500}, 500)


def bind_socket(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError naming host and port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen(BACKLOG)  # a client that reads the printed URL may come before the event loop runs
    except OSError as error:
        found.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --host or --port"
        ) from error
    return found


def url_of(bound: socket.socket) -> str:
    """The base URL of a bound socket, as a client on this machine reaches it."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def uvicorn_server(app: FastAPI) -> uvicorn.Server:
    """A uvicorn server for the app, to be run on a bound socket."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=5,
        timeout_keep_alive=75,
        ws="none",
    )
    return uvicorn.Server(config)


class ServerThread:
    """A session server in a background thread with an event loop of its own; a context manager.

    Raises PluginError or ConfigError from its constructor if a setting is wrong.
    """

    def __init__(self, settings: ServerSettings, registry: Registry | None = None) -> None:
        self.parts: Parts = load_parts(settings, registry or Registry.discover())
        self.service = SessionService(settings, self.parts)
        self._socket = bind_socket(settings.host, settings.port)
        self.url = url_of(self._socket)
        self._server = uvicorn_server(build_app(self.service))
        self._thread = threading.Thread(target=self._run, name="miles-session-server", daemon=True)

    @property
    def instance_id(self) -> str:
        """The `session_server_instance_id` of this server."""
        return self.service.instance_id

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])

    def __enter__(self) -> ServerThread:
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise ConfigError("the session server did not start; its log has the reason")
            self._thread.join(0.01)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join(15)
        self._socket.close()
