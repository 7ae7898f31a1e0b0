"""Looking after the workers in the background: who serves, who does not any more, who does again."""

from __future__ import annotations

import asyncio
import logging

from miles_core.engine.client import EngineClient
from miles_core.engine.identify import CHECK, identify
from miles_core.engine.route import Router, Worker
from miles_core.errors import EngineUnreachable

log = logging.getLogger("miles.server")

ANSWER_SECONDS = 20.0
"""How long a check waits. SGLang answers its own when the next token comes, and itself waits as long."""
MISSES = 2
"""Checks in a row that a worker may be late for, or answer 5xx to, before it is unhealthy; a refused connection says
so at once."""


class HealthChecks:
    """Asks every worker's `/health` each `interval` seconds, and each new one what it is."""

    def __init__(self, router: Router, client: EngineClient, interval: float) -> None:
        self.patient = False
        """Whether generation is paused, so that a worker that answers late is no sign of anything."""
        self._router, self._client, self._interval = router, client, interval
        self._misses: dict[str, int] = {}
        self._checks: dict[str, asyncio.Task[bool]] = {}
        self._loop: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, in the running event loop."""
        self._loop = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """End what runs."""
        tasks = [task for task in (self._loop, *self._checks.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            for worker in self._router.workers:
                self._begin(worker)
            await asyncio.sleep(self._interval)

    def _begin(self, worker: Worker) -> asyncio.Task[bool]:
        running = self._checks.get(worker.url)
        if running is not None:
            return running
        task = asyncio.get_running_loop().create_task(self.check(worker))
        self._checks[worker.url] = task
        task.add_done_callback(lambda _: self._checks.pop(worker.url, None))
        return task

    async def first(self, worker: Worker) -> None:
        """Look at a new worker: it takes no session before it is seen to be well. Without checks it does at once."""
        if self._interval:
            worker.healthy = False
            await self.check(worker, misses=1)

    async def check(self, worker: Worker, *, misses: int = MISSES) -> bool:
        """One check; whether it went well. `misses` in a row make the worker unhealthy."""
        fault, sure = await self._fault(worker.url)
        if fault is None:
            self._well(worker)
            if worker.kind is None:
                await self._identify(worker)
            return True
        count = self._misses[worker.url] = self._misses.get(worker.url, 0) + 1
        if (sure or (count >= misses and not self.patient)) and self._router.unwell(worker.url, fault):
            log.warning("the engine at %s is passed over until it is well again: %s", worker.url, fault)
        return False

    async def _fault(self, url: str) -> tuple[str | None, bool]:
        """What is wrong, if anything, and whether that is certain."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                reply = await self._client.request("GET", f"{url}/health", headers=CHECK)
        except EngineUnreachable as error:
            return error.message, True
        except TimeoutError:
            return f"GET /health was not answered within {ANSWER_SECONDS:g} s", False
        return (f"GET /health answered {reply.status}", False) if reply.status >= 500 else (None, False)

    def _well(self, worker: Worker) -> None:
        self._misses.pop(worker.url, None)
        if not worker.healthy:
            log.warning("the engine at %s is well again", worker.url)
        self._router.recovered(worker.url)

    async def _identify(self, worker: Worker) -> None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                found = await identify(self._client, worker.url)
        except TimeoutError:
            return
        if found is not None:
            worker.kind, worker.router = found.kind, found.router
        if worker.router is not None:
            log.warning("--engine %s is %s", worker.url, worker.router)
