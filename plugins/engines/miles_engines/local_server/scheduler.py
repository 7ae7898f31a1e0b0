"""The thread that runs the model: takes jobs in, gives every running one a token per step.

A step has two halves: new prompts are read (at most `prefill_chunk` tokens, so that a long prompt does not
stall the others), then each running sequence gets its next token. Jobs join and leave between steps, and
new weights come between them.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import torch

from miles_engines.local_server.batch import Rows, Running
from miles_engines.local_server.job import Finish, Job
from miles_engines.local_server.model import Model, Weights
from miles_engines.local_server.prefix_cache import PrefixCache, common_length
from miles_engines.local_server.sampling import Sampler

T = TypeVar("T")
log = logging.getLogger("miles.engine")

ABORTED: Finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_IN_QUEUE: Finish = {"type": "abort", "message": "Abort in waiting queue"}

SHARE_AT_LEAST = 32
"""A prompt waits for another one that is being read if it can reuse this many tokens of it."""


GROWTH = 256
"""Tokens that a sequence is expected to grow by when it is decided whether another one fits in memory."""


@dataclass(frozen=True)
class Load:
    """How busy the scheduler is."""

    running: int
    waiting: int
    cached_tokens: int


class Scheduler:
    """Runs jobs on the model. Public methods may be called from any thread; `loop` gets the wake-ups."""

    def __init__(
        self,
        model: Model,
        sampler: Sampler,
        cache: PrefixCache,
        loop: asyncio.AbstractEventLoop,
        *,
        stop_ids: frozenset[int] = frozenset(),
        max_batch: int = 64,
        prefill_chunk: int = 1024,
        max_kv_bytes: int | None = None,
        weight_version: str = "default",
    ) -> None:
        self.weight_version = weight_version
        self._model, self._sampler, self._cache, self._loop = model, sampler, cache, loop
        self._stop_ids, self._max_batch, self._chunk = stop_ids, max_batch, prefill_chunk
        self._max_kv_bytes, self._token_bytes = max_kv_bytes, 0
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._reading, self._decoding = Rows(), Rows()
        self._retracted: dict[Job, Running] = {}
        self._paused = False
        self._updates: list[Callable[[], None]] = []
        self._held: deque[Job] = deque()
        """Jobs that came behind an update."""
        self._news: dict[Job, None] = {}
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current step and wait for the thread; unfinished jobs stay unfinished."""
        self._inbox.put(self._halt)
        self._thread.join()

    def submit(self, job: Job) -> None:
        """Queue a job; its `changed` event tells of progress."""
        self._inbox.put(lambda: self._take(job))

    def abort(self, which: Callable[[Job], bool]) -> None:
        """End the jobs for which `which` is true, keeping what they have sampled."""
        self._inbox.put(lambda: self._abort(which))

    def flush(self) -> Future[bool]:
        """Empty the prefix cache; the result is False, and nothing is done, while jobs run or wait."""
        return self.call(self._flush)

    def call(self, action: Callable[[], T]) -> Future[T]:
        """Run something between two steps."""
        future, run = _promised(action)
        self._inbox.put(run)
        return future

    def pause(self, mode: str) -> Future[None]:
        """Take no more steps; what runs is ended (`abort`), queued again (`retract`) or stays as it is (`in_place`)."""
        return self.call(lambda: self._pause(mode))

    def resume(self) -> Future[None]:
        """Go on after `pause`."""
        return self.call(self._resume)

    def update(self, weights: Weights, *, version: str | None, flush: bool) -> Future[None]:
        """Use other weights: at once while paused, else when what runs and waits now is done; later jobs wait.

        `flush` empties the prefix cache; RuntimeError, and nothing is done, if running jobs hold part of it.
        """
        future, run = _promised(lambda: self._use(weights, version, flush))
        self._inbox.put(lambda: self._updates.append(run))
        return future

    def load(self) -> Load:
        """A snapshot for monitoring."""
        return Load(len(self._reading) + len(self._decoding), len(self._waiting), self._cache.tokens)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        with torch.inference_mode():
            while not self._stopped:
                self._receive()
                self._try_updates()
                self._try_step()
                self._publish()

    def _try_step(self) -> None:
        if self._stopped or not self._busy():
            return
        try:
            self._step()
        except Exception as error:  # a bad step must not end the server: fail its jobs by name
            log.exception("a step failed")
            self._fail_all(error)

    def _busy(self) -> bool:
        return not self._paused and bool(self._waiting or self._held or self._running())

    def _running(self) -> bool:
        return bool(self._reading.running or self._decoding.running)

    def _receive(self) -> None:
        """Do what was asked meanwhile; sleep until something is asked if there is nothing else to do."""
        if not self._busy() and not self._updates:
            self._inbox.get()()
        while True:
            try:
                self._inbox.get_nowait()()
            except queue.Empty:
                return

    def _halt(self) -> None:
        self._stopped = True

    def _take(self, job: Job) -> None:
        if job.params.max_new_tokens == 0:
            self._end(job, {"type": "length", "length": 0})
        else:
            (self._held if self._updates else self._waiting).append(job)

    def _flush(self) -> bool:
        if self._busy() or self._running():
            return False
        self._cache.clear()
        return True

    def _pause(self, mode: str) -> None:
        if mode == "abort":
            self._abort(lambda job: True)
        elif mode == "retract":
            for rows in (self._reading, self._decoding):
                for running in self._drop(rows, lambda job: True):
                    self._retracted[running.job] = running
                    running.job.retractions += 1
                    self._waiting.appendleft(running.job)
        self._paused = True

    def _resume(self) -> None:
        self._paused = False

    def _try_updates(self) -> None:
        if not self._updates or ((self._waiting or self._running()) and not self._paused):
            return
        for update in self._updates:
            update()
        self._updates.clear()
        self._waiting.extend(self._held)
        self._held.clear()

    def _use(self, weights: Weights, version: str | None, flush: bool) -> None:
        self._model.fits(weights)
        if flush and self._running():
            raise RuntimeError(
                "the prefix cache cannot be flushed while paused requests hold part of it: send flush_cache=false, "
                "or pause with mode=retract"
            )
        self._model.use(weights)
        if flush:
            self._cache.clear()
        if version is not None:
            self.weight_version = version

    def _step(self) -> None:
        self._admit()
        if self._reading.running:
            self._read_prompts()
        if self._decoding.running:
            self._decode()

    def _admit(self) -> None:
        """Move waiting jobs to the rows being read, in order, as far as there is room."""
        postponed: list[Job] = []
        while self._waiting and self._has_room(self._waiting[0]):
            if sum(running.pending for running in self._reading.running) >= self._chunk:
                break
            job = self._waiting.popleft()
            if self._worth_waiting(job):
                postponed.append(job)
                continue
            try:
                self._start(job)
            except Exception as error:  # e.g. no memory for its row: the others go on
                log.exception("a request could not start")
                self._end(job, _failed(error))
        self._waiting.extendleft(reversed(postponed))

    def _has_room(self, job: Job) -> bool:
        """Whether another row fits: rows are as wide as the longest sequence, so one long one costs all."""
        running = [*self._reading.running, *self._decoding.running]
        if not running or self._max_kv_bytes is None:
            return len(running) < self._max_batch
        self._token_bytes = self._token_bytes or self._reading.kv.token_bytes
        width = max(len(job.tokens), *(len(other.tokens) for other in running)) + GROWTH
        needed = (len(running) + 1) * width * self._token_bytes
        return len(running) < self._max_batch and needed <= self._max_kv_bytes

    def _worth_waiting(self, job: Job) -> bool:
        """Whether a prompt that is being read begins like this one, so that waiting saves reading it twice."""
        if not self._reading.running or not self._cache.enabled:
            return False
        stored = self._cache.match_length(job.tokens[:-1])
        others = (running.job.tokens for running in self._reading.running)
        return max(common_length(job.tokens, tokens) for tokens in others) >= stored + SHARE_AT_LEAST

    def _start(self, job: Job) -> None:
        # the last token is always read again: its logits are needed, and only keys and values are stored
        segments = self._cache.match(job.tokens[:-1])
        self._reading.add(self._retracted.pop(job) if job in self._retracted else self._new(job), segments)
        if not job.started:
            job.cached_tokens = sum(map(len, segments))
        job.started = True

    def _new(self, job: Job) -> Running:
        stop_ids = frozenset() if job.params.ignore_eos else self._stop_ids | job.params.stop_token_ids
        known = frozenset(token for token in stop_ids if 0 <= token < self._model.vocab_size)
        return Running(job, known)

    def _read_prompts(self) -> None:
        rows = self._reading.running
        columns = max(1, self._chunk // len(rows))
        work = [running.work(columns) for running in rows]
        logits = self._model.step(self._reading.kv, work)
        for running, item in zip(rows, work, strict=True):
            running.computed += len(item.tokens)
        done = [index for index, running in enumerate(rows) if not running.pending]
        if not done:
            return
        self._draw(logits[done], [rows[index] for index in done])
        for index in reversed(done):
            self._leave_reading(index)

    def _leave_reading(self, index: int) -> None:
        kv = self._reading.kv
        running = self._reading.running[index]
        self._cache.insert(running.tokens[: running.computed], lambda start, stop: kv.read(index, start, stop))
        if running.job.finish is None:
            self._decoding.add(running, [kv.read(index, 0, running.computed)])
        self._reading.remove(index)

    def _decode(self) -> None:
        rows = self._decoding.running
        logits = self._model.step(self._decoding.kv, [running.work(1) for running in rows])
        for running in rows:
            running.computed += 1
        self._draw(logits, rows)
        self._drop(self._decoding, lambda job: job.finish is not None)

    def _draw(self, logits: torch.Tensor, rows: Sequence[Running]) -> None:
        drawn = self._sampler.draw(logits, [running.row for running in rows])
        for index, running in enumerate(rows):
            token = drawn.ids[index]
            running.tokens.append(token)
            job = running.job
            top = drawn.tops[index] if job.params.top_logprobs else None
            job.accept(token, drawn.logprobs[index], top, self.weight_version)
            finish = _finish(running, token)
            if finish is not None:
                self._end(job, finish)
            job.published = len(job.output_ids)
            if job.live:
                self._news[job] = None

    def _end(self, job: Job, finish: Finish) -> None:
        job.end(finish)
        self._news[job] = None

    def _drop(self, rows: Rows, which: Callable[[Job], bool]) -> list[Running]:
        """Remove sequences, leaving their keys and values to the prefix cache; the last one first."""
        kv, dropped = rows.kv, []
        for index in reversed(range(len(rows))):
            running = rows.running[index]
            if which(running.job):
                tokens = running.tokens[: running.computed]
                self._cache.insert(tokens, lambda start, stop, row=index: kv.read(row, start, stop))  # type: ignore[misc]
                dropped.append(rows.remove(index))
        return dropped

    def _abort(self, which: Callable[[Job], bool]) -> None:
        for queued in (self._waiting, self._held):
            for job in [job for job in queued if which(job)]:
                queued.remove(job)
                self._retracted.pop(job, None)
                self._end(job, dict(ABORTED if job.started else ABORTED_IN_QUEUE))
        for rows in (self._reading, self._decoding):
            for running in rows.running:
                if which(running.job):
                    self._end(running.job, dict(ABORTED))
            self._drop(rows, lambda job: job.finish is not None)

    def _fail_all(self, error: Exception) -> None:
        for running in (*self._reading.running, *self._decoding.running):
            if running.job.finish is None:
                self._end(running.job, _failed(error))
        self._reading, self._decoding = Rows(), Rows()
        self._cache.clear()

    def _publish(self) -> None:
        """Wake the readers on the event loop, once per step for all of them."""
        if not self._news:
            return
        events = [job.changed for job in self._news]
        self._news = {}
        try:
            self._loop.call_soon_threadsafe(_set_all, events)
        except RuntimeError:  # the loop has closed: nobody is left to tell
            self._stopped = True


def _promised(action: Callable[[], T]) -> tuple[Future[T], Callable[[], None]]:
    """A future, and what settles it by running the action."""
    future: Future[T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():  # whoever asked has left
            return
        try:
            future.set_result(action())
        except Exception as error:
            future.set_exception(error)

    return future, run


def _set_all(events: Sequence[asyncio.Event]) -> None:
    for event in events:
        event.set()


def _failed(error: Exception) -> Finish:
    """An end by a fault of ours; routes answer it with its status."""
    message = f"the local engine failed: {type(error).__name__}: {error}"
    return {"type": "abort", "message": message, "status_code": 500, "err_type": "InternalServerError"}


def _finish(running: Running, token: int) -> Finish | None:
    """Why a sequence ends with the token just drawn, if it does."""
    job = running.job
    count = len(job.output_ids)
    if count >= job.params.min_new_tokens:
        if token in running.stop_ids:
            return {"type": "stop", "matched": token}
        string = job.stops.found(job.output_ids)
        if string is not None:
            return {"type": "stop", "matched": string}
    if count >= job.params.max_new_tokens:
        return {"type": "length", "length": job.params.max_new_tokens}
    return None
