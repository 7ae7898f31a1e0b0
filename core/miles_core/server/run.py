"""Running the session server in the foreground, until a signal stops it."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from miles_core.plugins import Registry
from miles_core.server.app import App, bind_socket, url_of, uvicorn_server
from miles_core.server.parts import Parts, load_parts
from miles_core.server.processes import STOP_SIGNALS, Processes
from miles_core.server.service import SessionService
from miles_core.server.settings import ServerSettings


def serve(
    settings: ServerSettings,
    registry: Registry,
    announce: Callable[[Parts, str], None],
    parts: Parts | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM. `announce` is called with what was loaded and the URL, once it is bound.

    `parts` are what `load_parts` gave, where they are loaded already.

    Raises PluginError or ConfigError if a setting is wrong.
    """
    with signals_held() as release:
        parts = parts or load_parts(settings, registry)
        service = SessionService(settings, parts)
        bound = bind_socket(settings.host, settings.port)
        _settle()
        try:
            announce(parts, settings.public_url or url_of(bound))
            if settings.workers > 1:
                Processes(service, bound, settings.workers, release).run()
            else:
                uvicorn_server(App(service, on_start=release)).run(sockets=[bound])
        finally:
            bound.close()


YOUNG = 5_000
"""New objects after which Python looks for cycles among them; a request of some megabytes makes more."""
MIDDLE = 1
"""How many such searches precede one of what they left: what a large request made is looked at while it is little."""
OLD = 10_000
"""How many of these precede one of everything, whose pause grows with what open sessions hold.

A turn leaves no cycles, so that this finds nothing of ours; a plugin's are found while they are young.
"""

ROOM = 16 * 2**20
"""Bytes that a few long turns at once use for a moment. The C library keeps what was used, so that it is best taken
from the system at start: what a server grows by from then on is what its sessions hold."""
_TEXT = 2**11
"""Bytes of a message's text, as most of that memory is used."""


def _settle() -> None:
    """Take what was loaded out of Python's search for cycles, which walks over all there is and stops every session."""
    used = [bytes(_TEXT) for _ in range(ROOM // _TEXT)]
    del used
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)
    gc.enable()


@contextmanager
def signals_held() -> Iterator[Callable[[], object]]:
    """Let a stop signal wait until the yielded function is called, at the latest until the end.

    One that came before uvicorn has its own handlers would be lost in whatever callback it interrupts.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
