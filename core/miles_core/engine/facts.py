"""What a worker says of itself: the version of its weights, and whether its streams carry every token's log-prob."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import orjson

from miles_core.engine.connection import EngineReply
from miles_core.errors import EngineUnreachable

log = logging.getLogger("miles.engine")

AGAIN_AFTER = 1.0
"""Seconds within which a worker is not asked again."""
PATIENCE = 5.0
"""Seconds that a worker's answer is waited for."""


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What `/model_info` said. `parses` is whether a reasoning or tool-call parser is configured."""

    weight_version: str | None
    parses: bool


class WorkerBook:
    """The facts of workers, each asked for at most once a second; lives in one event loop.

    `ask` requests a worker's `/model_info`.
    """

    def __init__(
        self, ask: Callable[[str], Awaitable[EngineReply]], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._asked: dict[str, tuple[float, asyncio.Task[WorkerFacts | None]]] = {}
        self._whole: set[str] = set()

    async def facts(self, worker: str) -> WorkerFacts | None:
        """What the worker says now, or said within the last second and since `forget`; None if it does not answer."""
        while True:
            when, task = self._asked.get(worker, (0.0, None))
            now = self._clock()
            if task is None or (task.done() and now - when >= AGAIN_AFTER):
                task = asyncio.get_running_loop().create_task(self._read(worker))
                self._asked[worker] = now, task
            # several turns wait for one answer; one that is cancelled leaves the others
            facts = await asyncio.shield(task)
            if self._asked.get(worker, (0.0, None))[1] is task:
                return facts

    def forget(self, worker: str) -> None:
        """Believe nothing of what it said so far, nor an answer that is on its way: its weights have changed."""
        self._asked.pop(worker, None)

    def drop(self, worker: str) -> None:
        """The worker was removed: one that is added at its URL may be another."""
        self.forget(worker)
        self._whole.discard(worker)

    async def _read(self, worker: str) -> WorkerFacts | None:
        try:
            async with asyncio.timeout(PATIENCE):
                reply = await self._ask(worker)
        except (EngineUnreachable, TimeoutError):
            return None
        return read_facts(reply)

    def streams(self, worker: str, facts: WorkerFacts | None) -> bool:
        """Whether turns of that worker can be streamed exactly, as far as is known."""
        return facts is not None and facts.parses and worker not in self._whole

    def whole_only(self, worker: str, reason: str) -> None:
        """A stream of the worker's did not hold together: its turns come whole from now on."""
        if worker not in self._whole:
            log.warning("turns of the engine at %s are answered whole from now on: %s", worker, reason)
            self._whole.add(worker)


def read_facts(reply: EngineReply) -> WorkerFacts | None:
    """An answer to `/model_info`; None if it is none."""
    try:
        info: Any = orjson.loads(reply.body) if reply.status == 200 else None
    except orjson.JSONDecodeError:
        return None
    if not isinstance(info, dict):
        return None
    version = info.get("weight_version")
    parses = bool(info.get("reasoning_parser") or info.get("tool_call_parser"))
    return WorkerFacts(None if version is None else str(version), parses)


def versions_between(before: WorkerFacts | None, after: WorkerFacts | None) -> tuple[str, ...]:
    """The weights that may have sampled between two answers, in order; empty if the worker names none."""
    named = [facts.weight_version for facts in (before, after) if facts is not None]
    return tuple(dict.fromkeys(version for version in named if version is not None))
