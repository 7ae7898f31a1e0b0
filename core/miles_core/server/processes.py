"""Several processes that serve one port, and the one above them that starts them, and again when they end.

They are forked when everything is loaded: a new one serves within milliseconds, what it reads is shared until it is
written (a tokenizer's tables are megabytes), and a wrong setting shows once. That is safe because nothing but this
runs yet: threads, event loop and connections are each process' own, made after the fork; the tokenizer library is told
to do without its threads (`load_parts`), which a forked process would wait for in vain; an engine that we start is
another program.

All accept from one listening socket, so that whoever is idle takes the next connection, and none is lost or waits when
a process ends. Sockets of their own (SO_REUSEPORT) spread connections blindly; what is in the queue of a process that
ends is lost with it, and new ones keep coming there; measured, they cost the same, since a process that is woken in
vain is back within microseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType

from miles_core.server.app import App, uvicorn_server
from miles_core.server.board import SESSIONS, UP, Board
from miles_core.server.handover import connections, take_over
from miles_core.server.peers import Link, Peers
from miles_core.server.service import SessionService

log = logging.getLogger("miles.server")

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
STEADY = 10.0
"""A process that lived for so many seconds was well; the next is started at once."""
LONGEST_WAIT = 30.0
"""Seconds between starts of a process that ends again and again."""
GRACE = 20.0
"""Seconds from the stop signal until a process that does not end is killed; each lets its turns end within 5."""
_PR_SET_PDEATHSIG = 1


@dataclass
class _Place:
    """One of the processes, or where the next will be."""

    number: int
    pid: int | None = None
    started: float = 0.0
    failures: int = 0
    """How many ended soon after their start, one after another."""
    start_at: float | None = None
    """When the next is started."""


@dataclass
class Processes:
    """The processes of a server; `run` serves until a stop signal, in the main thread of a program."""

    service: SessionService
    bound: socket.socket
    count: int
    release: Callable[[], object]
    """Lets a process take the stop signals that were held while it was not ready for them."""
    _stopping: int | None = field(default=None, init=False)
    """The first stop signal."""
    _served: bool = field(default=False, init=False)
    """Whether one of them ever did."""
    _deadline: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.board = Board(self.count)
        self.links = [Link() for _ in range(self.count)]
        self._places = [_Place(number) for number in range(self.count)]
        self._up, self._says_up = os.pipe()

    def run(self) -> None:
        """Start them, start what ends again, and stop all at SIGINT or SIGTERM. Raises SystemExit if none starts."""
        with self._closed_after(), _woken_by_signals() as woken:
            self._start(self._places[0])  # what is wrong with one is wrong with all: it is said once
            while self._stopping is None or any(place.pid for place in self._places):
                ready, _, _ = select.select([woken, self._up], [], [], self._patience())
                if self._up in ready:
                    self._start_others(os.read(self._up, 1024))
                for number in os.read(woken, 1024) if woken in ready else b"":
                    self._signal(number)
                self._reap()
                self._on_time()
        if self._stopping is not None:
            signal.raise_signal(self._stopping)  # as uvicorn does where it is alone

    @contextlib.contextmanager
    def _closed_after(self) -> Iterator[None]:
        try:
            yield
        finally:
            for link in self.links:
                link.close()
            os.close(self._up)
            os.close(self._says_up)

    def _patience(self) -> float | None:
        """Seconds until something is to be done."""
        times = [place.start_at for place in self._places if place.start_at is not None]
        times += [self._deadline] if self._deadline is not None else []
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _start_others(self, up: bytes) -> None:
        """Processes serve; after the first come the others."""
        self._served = self._served or bool(up)
        for place in self._places:
            if self._stopping is None and place.pid is None and place.start_at is None:
                self._start(place)

    def _signal(self, number: int) -> None:
        if number not in STOP_SIGNALS:
            return
        if self._stopping is None:
            self._stopping, self._deadline = number, time.monotonic() + GRACE
            self.bound.close()
        self._tell(number)

    def _tell(self, number: int) -> None:
        for place in self._places:
            place.start_at = None
            if place.pid is not None:
                os.kill(place.pid, number)

    def _on_time(self) -> None:
        now = time.monotonic()
        for place in self._places:
            if place.start_at is not None and place.start_at <= now:
                self._start(place)
        if self._deadline is not None and self._deadline <= now:
            self._deadline = None
            log.error("a process of the session server did not end within %g s of the stop signal: killed", GRACE)
            self._tell(signal.SIGKILL)

    # -- starts and ends ---------------------------------------------------------------------------------------

    def _start(self, place: _Place) -> None:
        place.start_at = None
        sys.stdout.flush()
        sys.stderr.flush()
        parent, place.started = os.getpid(), time.monotonic()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # our handlers are not for the new one
        try:
            place.pid = os.fork()
        except OSError as error:
            self._failed(place, f"could not be started: {error.strerror}")
        if place.pid == 0:
            _be_child(parent, lambda: self._serve(place.number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def _serve(self, number: int) -> None:
        """What a process does all its life."""
        peers = Peers(number, self.board, self.links)
        self.service.join(peers)

        def on_start() -> None:
            take_over(server, peers)
            self.board.put(number, UP, 1)
            self.release()
            os.write(self._says_up, bytes([number]))

        server = uvicorn_server(App(self.service, on_start=on_start), connections(peers))
        server.run(sockets=[self.bound])

    def _reap(self) -> None:
        """Note which processes ended, and why."""
        for place in self._places:
            if place.pid is None:
                continue
            pid, status = os.waitpid(place.pid, os.WNOHANG)
            if pid:
                self._ended(place, pid, os.waitstatus_to_exitcode(status))

    def _ended(self, place: _Place, pid: int, code: int) -> None:
        place.pid = None
        sessions = self.board.get(place.number, SESSIONS)
        self.board.clear(place.number)
        if self._stopping is not None:
            return
        if not self._served:
            sys.exit(code if code > 0 else 1)
        lost = f"; with it went {sessions} session{'s' * (sessions != 1)}" if sessions else ""
        self._failed(place, f"(pid {pid}) {_why(code)}{lost}")

    def _failed(self, place: _Place, what: str) -> None:
        now = time.monotonic()
        place.failures = 0 if now - place.started >= STEADY else place.failures + 1
        wait = 0.0 if place.failures < 2 else min(LONGEST_WAIT, 2.0 ** (place.failures - 2))
        place.start_at = now + wait
        when = f"in {wait:g} s" if wait else "now"
        log.error("process %d of the session server %s; another takes its place %s", place.number, what, when)


def _why(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (", by hand or for want of memory" if -code == signal.SIGKILL else "")


def _be_child(parent: int, work: Callable[[], None]) -> None:
    """Do the work in a process that was just forked, and end it; what the parent would do at its end stays its own."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in STOP_SIGNALS:
            signal.signal(number, _pass)  # uvicorn has handlers of its own, and repeats the signal when it is done
        os.setpgid(0, 0)  # Ctrl-C reaches the parent alone, which passes it on
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            work()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        log.exception("a process of the session server failed")
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _pass(number: int, frame: FrameType | None) -> None:
    pass


@contextlib.contextmanager
def _woken_by_signals() -> Iterator[int]:
    """A file on which the numbers of signals arrive, whichever thread they came to; handlers are put back after."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    handlers = {number: signal.signal(number, _pass) for number in (*STOP_SIGNALS, signal.SIGCHLD)}
    try:
        yield reader
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)
