"""`python -m miles_engines.local_server`: load the model, serve until told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence

from miles_core.errors import MilesError
from miles_engines.local_server.settings import ServingError, Settings, SettingsError, parse

SWITCH_INTERVAL = 0.001
"""Seconds; Python's 5 ms would let the model's thread keep the event loop waiting."""


class Status:
    """Tells the launcher, through the pipe it gave us, how starting goes; without a pipe, stderr has it all."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def send(self, kind: str, text: str) -> None:
        """One line: `progress …`, `error …` or `ready PORT`."""
        line = f"{kind} {text}".replace("\n", " ")
        print(line, file=sys.stderr, flush=True)
        if self._fd is not None:
            os.write(self._fd, line.encode("utf-8", "replace") + b"\n")

    def close(self) -> None:
        """The launcher has heard enough."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def main(argv: Sequence[str]) -> int:
    """Serve; the exit code is 0 after a requested stop, 1 if it could not start, 2 for a wrong flag."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        settings = parse(argv)
    except SettingsError as error:
        Status(_status_fd(argv)).send("error", str(error))
        return 2
    sys.setswitchinterval(SWITCH_INTERVAL)
    # read when torch is imported: spinning threads on a busy machine make steps a hundred times slower
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    status = Status(settings.status_fd)
    return _serve(settings, status)


def _serve(settings: Settings, status: Status) -> int:
    stop = threading.Event()
    if settings.exit_with_stdin:
        threading.Thread(target=_follow_stdin, args=(stop,), daemon=True).start()
    try:
        listener = _bind(settings)
        from miles_engines.local_server.serve import serve  # torch: after what is quickly known to be right

        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(serve(settings, listener, status.send, status.close))
    except Exception as error:  # the process's edge: whatever it is, the launcher shall be told
        logging.getLogger("miles.engine").exception("the engine failed")
        known = (MilesError, OSError, ServingError)
        status.send("error", str(error) if isinstance(error, known) else f"{type(error).__name__}: {error}")
        return 1
    return 0


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:  # not on every platform
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _bind(settings: Settings) -> socket.socket:
    """Bind before the model is loaded, so that a port in use is told at once."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}") from error
    return listener


def _follow_stdin(stop: threading.Event) -> None:
    """End with the launcher: its end of our stdin closes when it goes, however it goes."""
    while os.read(0, 4096):  # not sys.stdin: its lock, held here, would disturb the interpreter's end
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    stop.wait(10)  # a step on a large model may hold up the orderly end
    os._exit(1)


def _status_fd(argv: Sequence[str]) -> int | None:
    given = list(argv)
    return int(given[given.index("--status-fd") + 1]) if "--status-fd" in given else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
