"""The running engine as the routes see it: takes prompts in, keeps track of who asked for what."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from miles_engines.local_server.chat_format import ChatFormat
from miles_engines.local_server.job import Job
from miles_engines.local_server.model import Model
from miles_engines.local_server.protocol import ApiError, check_ids, check_length
from miles_engines.local_server.sampling import SamplingParams
from miles_engines.local_server.scheduler import Scheduler
from miles_engines.local_server.settings import Settings
from miles_engines.local_server.stops import StopStrings


@dataclass
class Service:
    """Model, scheduler and chat format of one server."""

    settings: Settings
    model: Model
    format: ChatFormat
    scheduler: Scheduler
    created: int = field(default_factory=lambda: int(time.time()))
    _active: dict[str, Job] = field(default_factory=dict)

    @property
    def model_name(self) -> str:
        """What the model is called towards clients."""
        return self.settings.served_model_name or str(self.model.path)

    def room(self, prompt: Sequence[int], limit: int | None) -> int:
        """How many tokens may follow a prompt; refuses prompts that do not fit or hold unknown ids."""
        room = check_length(len(prompt), limit, self.model.context_length)
        check_ids(list(prompt), self.model.vocab_size)
        return room

    def rids(self, given: str | list[str] | None, count: int) -> list[str]:
        """Request ids for `count` generations; refuses ones that are in use."""
        rids = [given] if isinstance(given, str) else list(given or ())
        if len(set(rids)) < len(rids):
            twice = sorted({rid for rid in rids if rids.count(rid) > 1})
            raise ApiError(f"Duplicate request IDs detected within the request: {twice}")
        for rid in rids:
            if rid in self._active:
                raise ApiError(f"Duplicate request ID detected: {rid}")
        return (rids + [uuid.uuid4().hex for _ in range(count)])[:count]

    def job(self, rid: str, prompt: list[int], params: SamplingParams, *, live: bool) -> Job:
        """A generation to run; see `running`."""
        for token, _ in params.logit_bias:
            if not 0 <= token < self.model.vocab_size:
                size = self.model.vocab_size
                raise ApiError(f"logit_bias has token id {token}, outside the model's vocabulary of {size} ids.")
        stops = StopStrings(params.stop, self.format.decode, self.format.encode)
        return Job(rid=rid, prompt=prompt, params=params, stops=stops, live=live)

    @asynccontextmanager
    async def running(self, jobs: Sequence[Job]) -> AsyncIterator[None]:
        """Run jobs inside the block; leaving it early, e.g. as the client hung up, ends what still runs."""
        self._check_queue()
        for job in jobs:
            self._active[job.rid] = job
            self.scheduler.submit(job)
        try:
            yield
        finally:
            for job in jobs:
                del self._active[job.rid]
            unfinished = {job for job in jobs if job.finish is None}
            if unfinished:
                self.scheduler.abort(unfinished.__contains__)

    def _check_queue(self) -> None:
        most = self.settings.max_queue
        if most is not None and len(self._active) >= most + self.settings.max_batch:
            raise ApiError("The request queue is full.", status=503, kind="503")

    def abort(self, rid: str | None, everything: bool) -> None:
        """End the jobs whose rid begins with `rid`, as SGLang, or all."""
        if everything or rid:
            self.scheduler.abort(lambda job: everything or job.rid.startswith(rid or ""))
