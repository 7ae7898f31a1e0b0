"""The engines behind `/generate`: a sample keeps to one worker, and moves when that one fails."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from miles_core.engine.identify import CHECK
from miles_core.engine.route import Router
from miles_core.errors import EngineError
from miles_core.rollout import http

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger(__name__)

TRIES = 8
"""How often one generation is asked for, on whichever worker, before its sample is given up: about ten seconds."""

STOPPED: Mapping[str, Any] = {"text": "", "output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}}
"""What is answered once the run has stopped: nothing was sampled."""

ABORT_TIMEOUT = 5.0
"""Seconds an engine may take to hear that a request is no longer wanted."""


class Engines:
    """Workers that answer `/generate`; `limit` is how many requests may be under way at once."""

    def __init__(self, urls: Sequence[str], *, api_key: str | None = None, limit: int | None = None) -> None:
        self._router = Router(urls)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._limit = asyncio.Semaphore(limit) if limit else None
        self.http: aiohttp.ClientSession | None = None
        """The run's client, while it lasts."""
        self._stopped = False
        self._under_way: dict[str, str] = {}
        """Request ids and their workers."""

    @property
    def urls(self) -> list[str]:
        """The workers' base URLs."""
        return [worker.url for worker in self._router.workers]

    async def answer(self) -> bool:
        """Whether any worker answers, as far as a look at its `/health` can tell."""
        headers = {**self._headers, **CHECK}
        async with http.client(None) as session:  # a new connection: those that we have may be dead
            looks = (http.once(session, "get", f"{url}/health", None, headers) for url in self.urls)
            tasks = [asyncio.create_task(http.is_up(look)) for look in looks]
            try:
                for look in asyncio.as_completed(tasks):
                    if await look:
                        return True
                return False
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def resume(self) -> None:
        """Take requests again, after `stop`."""
        self._stopped = False

    async def stop(self) -> None:
        """Have the workers stop what is under way, which is then answered with what there is, and take nothing new."""
        self._stopped = True
        async with http.client(self.http) as session:
            await asyncio.gather(*(self._abort(session, worker, rid) for rid, worker in self._under_way.items()))

    @asynccontextmanager
    async def lane(self, key: str | None = None) -> AsyncIterator[Lane]:
        """A sample's way to a worker; `key` tells routers in between which requests belong together."""
        lane = Lane(self, key or uuid.uuid4().hex)
        self._router.enter(lane.worker)
        try:
            yield lane
        finally:
            self._router.leave(lane.worker)

    async def ask(self, lane: Lane, payload: Mapping[str, Any]) -> Any:
        """One `/generate` request of a lane, tried on other workers where its own fails."""
        if self._limit is None:
            return await self._ask(lane, payload)
        async with self._limit:
            return await self._ask(lane, payload)

    async def _ask(self, lane: Lane, payload: Mapping[str, Any]) -> Any:
        delay = http.FIRST_DELAY
        async with http.client(self.http) as session:
            for left in range(TRIES - 1, -1, -1):
                if self._stopped:
                    break
                try:
                    return await self._once(session, lane, payload)
                except EngineError as error:
                    if self._stopped:
                        break
                    if not http.may_retry(error) or not left:
                        raise
                    log.info("generation moves: %s", error.message)
                    self._move(lane, error.message)
                await asyncio.sleep(delay)
                delay = min(2 * delay, http.LONGEST_DELAY)
        return dict(STOPPED)  # the last try returns or raises

    async def _once(self, session: aiohttp.ClientSession, lane: Lane, payload: Mapping[str, Any]) -> Any:
        """One request under a name of its own; if we are cancelled, the engine is told to stop it."""
        rid = uuid.uuid4().hex
        headers = {**self._headers, "X-SMG-Routing-Key": lane.key}
        self._under_way[rid] = lane.worker
        try:
            reply = await http.once(session, "post", f"{lane.worker}/generate", {**payload, "rid": rid}, headers)
        except asyncio.CancelledError:
            await self._abort(session, lane.worker, rid)
            raise
        finally:
            del self._under_way[rid]
        self._router.recovered(lane.worker)
        return reply

    async def _abort(self, session: aiohttp.ClientSession, worker: str, rid: str) -> None:
        try:
            async with asyncio.timeout(ABORT_TIMEOUT):
                await http.once(session, "post", f"{worker}/abort_request", {"rid": rid}, self._headers)
        except (EngineError, TimeoutError):
            log.info("the engine at %s was not told to abort %s", worker, rid)

    def _move(self, lane: Lane, reason: str) -> None:
        self._router.failed(lane.worker, reason)
        self._router.leave(lane.worker)
        lane.worker = self._router.choose(lane.key, but=lane.worker)
        self._router.enter(lane.worker)


class Lane:
    """Where a sample's requests go: `worker`, one URL, until that worker fails."""

    def __init__(self, engines: Engines, key: str) -> None:
        self._engines = engines
        self.key = key
        self.worker = engines._router.choose(key)

    async def generate(self, payload: Mapping[str, Any]) -> Any:
        """The engine's reply to a `/generate` request. Raises EngineError."""
        return await self._engines.ask(self, payload)
