"""Which worker a session's turns go to: the least loaded when it starts, then the same one as long as it serves."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from miles_core.errors import ConfigError, Overloaded

RETRY_AFTER_SECONDS = 5.0
"""How long a worker whose connection broke is passed over when others are there, unless it is seen to be well."""


@dataclass(slots=True, eq=False)
class Worker:
    """An engine worker as this process knows it."""

    url: str
    draining: bool = False
    """Whether it is to be left: it takes no session, and those it has move at their next turn."""
    healthy: bool = True
    """What the last health check found."""
    sessions: int = 0
    in_flight: int = 0
    errors: int = 0
    """Requests that could not be made, or broke off."""
    failed_at: float | None = None
    last_error: str | None = None
    kind: str | None = None
    """What it said it is, once it was asked, such as `sglang 0.5.23`."""
    router: str | None = None
    """If it is a router, which, and what to do: turns do not work through it."""

    @property
    def state(self) -> str:
        """For a person: `healthy`, `unhealthy` or `draining`."""
        return "draining" if self.draining else "healthy" if self.healthy else "unhealthy"


class Router:
    """The workers, and the choice among them: by sessions on each; ties are broken by rendezvous hashing."""

    def __init__(self, urls: Sequence[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        if not urls:
            raise ConfigError("no engine URL given; use --engine URL or --engine local")
        self._clock = clock
        self._workers = {url: Worker(url) for url in dict.fromkeys(url.rstrip("/") for url in urls)}

    @property
    def workers(self) -> list[Worker]:
        """All of them, in the order they were added."""
        return list(self._workers.values())

    def get(self, url: str) -> Worker | None:
        """The worker at that URL, if it is one of them."""
        return self._workers.get(url)

    def add(self, url: str) -> Worker:
        """A new worker, or the one that is there."""
        return self._workers.setdefault(url, Worker(url))

    def remove(self, url: str) -> Worker | None:
        """Forget a worker; what runs on it goes on, and its sessions move at their next turn."""
        return self._workers.pop(url, None)

    # -- the choice --------------------------------------------------------------------------------------------

    def choose(self, session_id: str, *, but: str | None = None) -> str:
        """A worker for a session: one that serves, `but` left out; failing that any that is not draining.

        Raises Overloaded (503) if all are draining.
        """
        open_ = [worker for worker in self._workers.values() if not worker.draining]
        if not open_:
            raise Overloaded(
                f"no engine takes new sessions: all {len(self._workers)} are draining; add one (/admin/engines)",
                retry_after=5,
                status=503,
            )
        others = [worker for worker in open_ if worker.url != but] or open_
        serving = [worker for worker in others if self._serves(worker)] or others
        return min(serving, key=lambda worker: (worker.sessions, _rank(session_id, worker.url))).url

    def keeps(self, url: str) -> bool:
        """Whether a session stays at its worker: it is there, and serves, or no other would."""
        worker = self._workers.get(url)
        if worker is None:
            return False
        if worker.healthy and not worker.draining:
            return True
        return not any(
            self._serves(other) and not other.draining for other in self._workers.values() if other is not worker
        )

    def _serves(self, worker: Worker) -> bool:
        lately = worker.failed_at is not None and self._clock() - worker.failed_at < RETRY_AFTER_SECONDS
        return worker.healthy and not lately

    # -- what happens ------------------------------------------------------------------------------------------

    def enter(self, url: str) -> None:
        """A session keeps to this worker from now on."""
        if (worker := self._workers.get(url)) is not None:
            worker.sessions += 1

    def leave(self, url: str) -> None:
        """A session has ended or moved away."""
        if (worker := self._workers.get(url)) is not None:
            worker.sessions = max(0, worker.sessions - 1)

    @contextmanager
    def running(self, url: str) -> Iterator[None]:
        """A turn is in flight there while the block runs."""
        worker = self._workers.get(url) or Worker(url)
        worker.in_flight += 1
        try:
            yield
        finally:
            worker.in_flight -= 1

    def failed(self, url: str, reason: str) -> None:
        """A request to the worker broke."""
        if (worker := self._workers.get(url)) is not None:
            worker.errors += 1
            worker.failed_at, worker.last_error = self._clock(), reason

    def recovered(self, url: str) -> None:
        """A request to the worker succeeded."""
        if (worker := self._workers.get(url)) is not None:
            worker.failed_at, worker.healthy = None, True

    def unwell(self, url: str, reason: str) -> bool:
        """A health check failed: the worker is passed over until one succeeds. Whether that is news."""
        worker = self._workers.get(url)
        if worker is None:
            return False
        was, worker.healthy, worker.last_error = worker.healthy, False, reason
        return was


def _rank(session_id: str, url: str) -> bytes:
    return hashlib.sha256(f"{session_id} {url}".encode()).digest()
