"""The workers of one engine: started together, watched from then on, and started again when they die."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from miles_core.errors import MilesError, PluginContractError
from miles_engines.sglang_server.worker import State, Worker

POLL = 0.25
"""Seconds between looks at the workers."""

FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0
"""Seconds before a worker that died is started again; twice as long each time that it did not last."""

LASTED = 120.0
"""Seconds of service after which a death counts as the first one again."""

MOST_STARTS = 6
"""How often in a row a worker is started without lasting before it is given up."""

TOLD_EVERY = 5.0
TOLD_AT_LEAST_EVERY = 30.0
"""Seconds between lines about a start: where the log has something new, and where it has not."""

Say = Callable[[str], None]


class Starting:
    """Tells how a start is going, not too often."""

    def __init__(self, worker: Worker, say: Say) -> None:
        self._worker = worker
        self._say = say
        self._told = worker.since
        self._line = ""

    def tell(self) -> None:
        """A line with the time and what the log says last, if one is due."""
        now, line = time.monotonic(), self._worker.last_line()
        wait = TOLD_EVERY if line != self._line else TOLD_AT_LEAST_EVERY
        if now - self._told >= wait:
            self._told, self._line = now, line
            seconds = now - self._worker.since
            self._say(f"{self._worker.recipe.name} is starting, {seconds:.0f} s: {line or 'nothing in its log yet'}")


class Watched:
    """A worker with how often it died, and when it is started next."""

    def __init__(self, worker: Worker, say: Say) -> None:
        self.worker = worker
        self.given_up = False
        self._say = say
        self._starts = 1
        self._due: float | None = None
        self._starting = Starting(worker, say)

    def step(self) -> None:
        """Look at the worker; start it again if that is due."""
        if self.given_up:
            return
        if self._due is not None:
            if time.monotonic() >= self._due:
                self._due = None
                self._attempt(self.worker.start)
                self._starting = Starting(self.worker, self._say)
            return
        was, since = self.worker.state, self.worker.since
        if was is State.SERVING and time.monotonic() - since > LASTED:
            self._starts = 1
        self._attempt(self.worker.look)
        if self.worker.state is State.STARTING:
            self._starting.tell()
        elif self.worker.state is State.SERVING and was is State.STARTING:
            self._say(f"{self.worker.recipe.name} serves again at {self.worker.recipe.url}")

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except (MilesError, OSError) as error:
            self._say(error.message if isinstance(error, MilesError) else f"cannot start it: {error}")
            name = self.worker.recipe.name
            if self._starts >= MOST_STARTS or isinstance(error, PluginContractError):
                self.given_up = True
                self._say(f"{name} is given up; its log: {self.worker.recipe.log}")
                return
            delay = min(FIRST_DELAY * 2 ** (self._starts - 1), LONGEST_DELAY)
            self._starts += 1
            self._due = time.monotonic() + delay
            self._say(f"{name} is started again in {delay:g} s")


class Supervisor:
    """Several workers. `say` is told in one line what happens."""

    def __init__(self, workers: Sequence[Worker], say: Say) -> None:
        self._workers = workers
        self._say = say
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._watched: list[Watched] = []

    def start(self) -> None:
        """Start them all and wait until they serve. Raises EngineStartError or PluginContractError."""
        for worker in self._workers:
            worker.start()
        tellers = [Starting(worker, self._say) for worker in self._workers]
        left = list(zip(self._workers, tellers, strict=True))
        while left:
            for worker, teller in left:
                worker.look()
                teller.tell()
            left = [pair for pair in left if pair[0].state is not State.SERVING]
            if left:
                time.sleep(POLL)
        self._watched = [Watched(worker, self._say) for worker in self._workers]
        self._thread = threading.Thread(target=self._watch, name="sglang-supervisor", daemon=True)
        self._thread.start()

    def alive(self) -> bool:
        """Whether any worker serves, or may again."""
        return any(not watched.given_up for watched in self._watched)

    def close(self) -> None:
        """Stop watching, then every worker; may be called twice."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        closers = [threading.Thread(target=worker.close) for worker in self._workers]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()

    def _watch(self) -> None:
        while not self._stop.wait(POLL):
            for watched in self._watched:
                watched.step()
