"""Long work in threads, so that the event loop goes on answering other sessions."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

THREADS = min(4, os.cpu_count() or 1)
SWITCH_SECONDS = 0.0002
"""How long a thread that runs Python lets the event loop wait for the interpreter; a small
turn waits for it some ten times, so Python's own 5 ms add up."""


class Offload:
    """A few threads for work that takes longer than other sessions should wait; the work must be safe in any thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="miles-work")
        self._alone = asyncio.Lock()
        sys.setswitchinterval(SWITCH_SECONDS)

    async def run(self, work: Callable[..., T], *given: object) -> T:
        """The work's result. It always ends before this does, also when the caller is cancelled."""
        future = asyncio.get_running_loop().run_in_executor(self._pool, work, *given)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                try:
                    await asyncio.wait([future])
                except asyncio.CancelledError:
                    continue
            raise

    async def run_alone(self, work: Callable[[], T]) -> T:
        """The same for work that makes millions of objects: one of a kind at a time, so that memory holds it."""
        async with self._alone:
            return await self.run(_without_search, work)

    def close(self) -> None:
        """Let the threads end when their work is done."""
        self._pool.shutdown(wait=False)


def _without_search(work: Callable[[], T]) -> T:
    """Run work while Python does not search for cycles, which walks over lists of millions and stops every thread."""
    searched = gc.isenabled()
    gc.disable()
    try:
        return work()
    finally:
        if searched:
            gc.enable()
