"""One generation, as the event loop and the scheduler's thread share it.

The event loop creates it and reads it; from `submit` until it is finished only the scheduler's thread
writes. Fields are written in an order that makes reading without a lock safe: see `Job.seen`.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from miles_engines.local_server.sampling import SamplingParams
from miles_engines.local_server.stops import StopStrings

Finish = dict[str, Any]
"""SGLang's `finish_reason`: `{"type": "stop", "matched": …}`, `{"type": "length", "length": n}`, `abort`."""


@dataclass(eq=False)
class Job:
    """A prompt, how to sample after it, and what has been sampled so far."""

    rid: str
    prompt: list[int]
    params: SamplingParams
    stops: StopStrings
    live: bool = False
    """Whether the reader wants to hear of each token, or of the end alone."""
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[tuple[float, int]]] = field(default_factory=list)
    published: int = 0
    finish: Finish | None = None
    started: bool = False
    cached_tokens: int = 0
    retractions: int = 0
    """How often it gave up its row and began again from its tokens."""
    versions: list[tuple[str, int]] = field(default_factory=list)
    """Weight versions, each with the index of the first token it sampled."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    submitted: float = field(default_factory=time.monotonic)
    finished: float | None = None

    def accept(self, token: int, logprob: float, top: list[tuple[float, int]] | None, version: str) -> None:
        """Add a sampled token; called by the scheduler, which then sets `finish`, then `published`."""
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, len(self.output_ids)))
        if top is not None:
            self.tops.append(top)
        self.logprobs.append(logprob)
        self.output_ids.append(token)

    def end(self, finish: Finish) -> None:
        """Mark it finished; nothing is written afterwards."""
        self.finished = time.monotonic()
        self.finish = finish

    def seen(self) -> tuple[int, Finish | None]:
        """How many tokens may be read, and the finish reason once all of them may.

        `published` is read first: it is written last, so a count that covers the last token comes with
        the finish reason.
        """
        count = self.published
        finish = self.finish
        return (count, None) if finish is None else (len(self.output_ids), finish)

    async def wait(self) -> tuple[int, Finish | None]:
        """Wait for news (each token if `live`, else the end), then `seen`."""
        await self.changed.wait()
        self.changed.clear()
        return self.seen()

    async def result(self) -> Finish:
        """Wait for the end."""
        while True:
            _, finish = await self.wait()
            if finish is not None:
                return finish

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """The prompt, and what has been sampled after it, as an array."""
        return np.concatenate((self._prompt, self.output_ids)) if self.output_ids else self._prompt

    @cached_property
    def _prompt(self) -> npt.NDArray[np.int64]:
        return np.asarray(self.prompt, np.int64)

    @property
    def latency(self) -> float:
        """Seconds from submission to the end, or until now."""
        return (self.finished or time.monotonic()) - self.submitted
