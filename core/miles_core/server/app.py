"""The session server as an ASGI application, and running it on a socket."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from types import TracebackType

import uvicorn

from miles_core.errors import ConfigError, MilesError
from miles_core.plugins import Registry
from miles_core.server.answers import error_reply
from miles_core.server.http import Event, HungUp, Receive, Reply, Request, Send, json_reply
from miles_core.server.parts import Parts, load_parts
from miles_core.server.relay import relay
from miles_core.server.routes import Routes
from miles_core.server.service import SessionService
from miles_core.server.settings import ServerSettings

log = logging.getLogger("miles.server")

BACKLOG = 4096
"""Connections that wait to be accepted."""


class App:
    """The ASGI application of a service; `on_start` is called when the server's event loop is up."""

    def __init__(self, service: SessionService, *, on_start: Callable[[], object] | None = None) -> None:
        self._service = service
        self._routes = Routes(service)
        self._on_start = on_start

    async def __call__(self, scope: Event, receive: Receive, send: Send) -> None:
        """Serve one request, or the server's life."""
        if scope["type"] == "http":
            await self._serve(Request(scope, receive), send)
        elif scope["type"] == "lifespan":
            await self._live(receive, send)

    async def _serve(self, request: Request, send: Send) -> None:
        try:
            reply = await self._answer(request)
        except MilesError as error:
            reply = error_reply(error)
        except HungUp:
            return
        except Exception as error:
            log.exception("%s %s failed", request.method, request.path)
            text = f"internal error: {type(error).__name__}"
            reply = json_reply({"error": text, "type": "server_error", "code": 500}, 500)
        await reply.send(request, send)

    async def _answer(self, request: Request) -> Reply:
        """The answer, which another process gives to the few requests whose connection could not move to it."""
        peers = self._service.peers
        owner = peers.owner_of(request.path) if peers is not None else None
        if peers is None or owner is None:
            return await self._routes.answer(request)
        return await relay(peers, owner, request, self._routes.body_limit)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self._service.start()
            await self._routes.admin.catch_up()
            if self._on_start is not None:
                self._on_start()
        except Exception as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._service.stop()
        await send({"type": "lifespan.shutdown.complete"})


def bind_socket(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError naming host and port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen(BACKLOG)  # a client that reads the printed URL may come before the event loop runs
    except (OSError, OverflowError) as error:  # OverflowError: no such port
        found.close()
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}; choose another --host or --port") from error
    return found


def url_of(bound: socket.socket) -> str:
    """The base URL of a bound socket, as a client on this machine reaches it."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def uvicorn_server(app: App | TurnLimit, connections: type[asyncio.Protocol] | None = None) -> uvicorn.Server:
    """A uvicorn server for the app, to be run on a bound socket; `connections` other than uvicorn's own."""
    config = uvicorn.Config(
        app,
        http=connections or "auto",
        lifespan="on",
        log_level="warning",
        access_log=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=5,
        timeout_keep_alive=75,
        ws="none",
    )
    return uvicorn.Server(config)


class TurnLimit:
    """An application that takes so many chat turns at once; the others wait, in the order in which they came."""

    def __init__(self, app: App, limit: int) -> None:
        self._app, self._places = app, asyncio.Semaphore(limit)

    async def __call__(self, scope: Event, receive: Receive, send: Send) -> None:
        """Serve one request, a turn when there is room for it, until its answer has been sent."""
        if scope["type"] == "http" and scope["path"].endswith("/v1/chat/completions"):
            async with self._places:
                await self._app(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class ServerThread:
    """A session server in a background thread with an event loop of its own; a context manager.

    `parts` are what `load_parts` gave, where they are loaded already. Turns beyond `turns_at_once` wait, while those
    beyond `max_concurrent` of the settings are refused.

    Raises PluginError or ConfigError from its constructor if a setting is wrong.
    """

    def __init__(
        self,
        settings: ServerSettings,
        registry: Registry | None = None,
        parts: Parts | None = None,
        *,
        turns_at_once: int | None = None,
    ) -> None:
        self.parts: Parts = parts or load_parts(settings, registry or Registry.discover())
        self.service = SessionService(settings, self.parts)
        self._socket = bind_socket(settings.host, settings.port)
        self.url = url_of(self._socket)
        app = App(self.service)
        self._server = uvicorn_server(TurnLimit(app, turns_at_once) if turns_at_once else app)
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
