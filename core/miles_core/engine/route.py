"""Which worker a session's turns go to: the least loaded when it starts, then always the same one."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Sequence

from miles_core.errors import ConfigError

RETRY_AFTER_SECONDS = 5.0
"""How long a worker that failed is passed over when others are there."""


class Router:
    """Chooses workers by the number of sessions on each; ties are broken by rendezvous hashing."""

    def __init__(self, workers: Sequence[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        if not workers:
            raise ConfigError("no engine URL given; use --engine URL or --engine local")
        self.workers = tuple(dict.fromkeys(worker.rstrip("/") for worker in workers))
        self._load: Counter[str] = Counter()
        self._failed: dict[str, float] = {}
        self._clock = clock

    def choose(self, session_id: str, *, but: str | None = None) -> str:
        """A worker for a session; `but` is left out, and workers that failed lately, where others are there."""
        others = [w for w in self.workers if w != but] or list(self.workers)
        now = self._clock()
        healthy = [w for w in others if now - self._failed.get(w, -1e9) >= RETRY_AFTER_SECONDS] or others
        return min(healthy, key=lambda w: (self._load[w], hashlib.sha256(f"{session_id} {w}".encode()).digest()))

    def enter(self, worker: str) -> None:
        """A session keeps to this worker from now on."""
        self._load[worker] += 1

    def leave(self, worker: str) -> None:
        """A session has ended or moved away."""
        self._load[worker] = max(0, self._load[worker] - 1)

    def failed(self, worker: str) -> None:
        """A request to the worker broke."""
        self._failed[worker] = self._clock()

    def recovered(self, worker: str) -> None:
        """A request to the worker succeeded."""
        self._failed.pop(worker, None)
