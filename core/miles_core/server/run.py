"""Running the session server in the foreground, until a signal stops it."""

from __future__ import annotations

from collections.abc import Callable

from miles_core.plugins import Registry
from miles_core.server.app import bind_socket, build_app, url_of, uvicorn_server
from miles_core.server.service import Parts, SessionService, load_parts
from miles_core.server.settings import ServerSettings


def serve(settings: ServerSettings, registry: Registry, announce: Callable[[Parts, str], None]) -> None:
    """Serve until SIGINT or SIGTERM. `announce` is called with what was loaded and the URL, once it is bound.

    Raises PluginError or ConfigError if a setting is wrong.
    """
    parts = load_parts(settings, registry)
    service = SessionService(settings, parts)
    bound = bind_socket(settings.host, settings.port)
    try:
        announce(parts, settings.public_url or url_of(bound))
        uvicorn_server(build_app(service)).run(sockets=[bound])
    finally:
        bound.close()
