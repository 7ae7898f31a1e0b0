"""Run every prompt's rollouts concurrently; a failing one costs itself, an interrupt costs those under way."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from miles_core.errors import ConfigError, MilesError
from miles_core.rollout.data import Prompt
from miles_core.rollout.loader import Generate
from miles_core.rollout.output import Record, RunDirectory, encode_line
from miles_core.rollout.state import RolloutState
from miles_core.rollout.summary import Tally
from miles_core.types import GenerateFnInput, Sample, SampleStatus

log = logging.getLogger(__name__)

ABORT_TIMEOUT = 30.0
"""Seconds an agent's `abort` may take."""

SHOWN_FAILURES = 10
"""More than that are only written to the file."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How many rollouts of each prompt, how many at once, how long one may take (seconds), and their seed."""

    samples_per_prompt: int = 1
    concurrency: int = 64
    sample_timeout: float | None = None
    seed: int | None = None


@dataclass(frozen=True)
class Job:
    """One rollout to do."""

    prompt: Prompt
    sample_index: int

    @property
    def key(self) -> tuple[str, int, int]:
        """What tells whether it is finished: prompt hash, prompt index, sample index."""
        return self.prompt.hash, self.prompt.index, self.sample_index


class RolloutFailed(MilesError):
    """A rollout ended without anything to keep; the message says why."""


class RolloutRunner:
    """Runs rollouts and writes what they give; `observer` is called after each one, with the totals so far."""

    def __init__(
        self,
        state: RolloutState,
        generate: Generate,
        directory: RunDirectory,
        options: RunOptions,
        observer: Callable[[Tally], None] = lambda tally: None,
    ) -> None:
        self.state = state
        self.generate = generate
        self.directory = directory
        self.options = options
        self.observer = observer
        self.tally = Tally()
        self.done: set[tuple[str, int, int]] = set()
        for record in directory.records():
            self.done.add((record["prompt_hash"], record["prompt_index"], record["sample_index"]))
            self.tally.add(record, resumed=True)

    def jobs(self, prompts: Iterable[Prompt]) -> list[Job]:
        """What is left to do: each prompt's samples side by side, in the prompts' order."""
        jobs = (Job(prompt, at) for prompt in prompts for at in range(self.options.samples_per_prompt))
        return [job for job in jobs if job.key not in self.done]

    async def run(self, jobs: Sequence[Job]) -> None:
        """Do all jobs; cancelling it stops those under way, keeps what is finished, and calls the agent's abort."""
        import aiohttp

        waiting = iter(jobs)
        timeout = aiohttp.ClientTimeout(total=None, connect=60)
        # shorter than the server keeps a connection: an agent may think for exactly that long
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as self.state.http:
            workers = min(self.options.concurrency, len(jobs))
            tasks = [asyncio.create_task(self._work(waiting)) for _ in range(workers)]
            try:
                await _all(tasks)
            finally:
                self.state.aborted = True
                await _cancel(tasks)
                await self._abort()
                self.state.http = None

    async def _work(self, waiting: Iterator[Job]) -> None:
        for job in waiting:
            await self._do(job)
            self.observer(self.tally)

    async def _do(self, job: Job) -> None:
        """One rollout; only a fault of the run itself (configuration, disk) gets out."""
        started = time.monotonic()
        try:
            records = await self._rollout(job)
            lines = b"".join(encode_line(record) for record in records)
        except ConfigError:
            raise
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            self._fail(job, RolloutFailed("the rollout cancelled itself"), started)
        except (Exception, SystemExit) as error:
            self._fail(job, error, started)
        else:
            for record in records:  # first: a cancelled append still gets to the disk, when the folder closes
                self.tally.add(record)
            await self.directory.append_lines(lines)

    async def _rollout(self, job: Job) -> list[Record]:
        sample = new_sample(job, self.options.samples_per_prompt)
        params = dict(self.state.sampling_params)
        if self.options.seed is not None:
            params["sampling_seed"] = sample_seed(self.options.seed, job)
        limit = self.options.sample_timeout
        try:
            async with asyncio.timeout(limit) as clock:
                output = await self.generate(GenerateFnInput(self.state, sample, params))
        except TimeoutError as error:
            if clock.expired():
                raise RolloutFailed(f"not finished within {limit:g} s (--sample-timeout)") from error
            raise
        samples = output.as_list()
        for each in samples:
            each.validate()
        if all(each.status is SampleStatus.ABORTED and not each.tokens for each in samples):
            raise RolloutFailed(str(samples[0].metadata.get("agent_error") or "aborted before its first turn"))
        return [to_record(job, each, at, len(samples)) for at, each in enumerate(samples)]

    def _fail(self, job: Job, error: BaseException, started: float) -> None:
        self.tally.failures += 1
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, RolloutFailed):
            text = error.message
        level = logging.WARNING if self.tally.failures <= SHOWN_FAILURES else logging.DEBUG
        log.log(level, "prompt %d sample %d failed: %s", job.prompt.index, job.sample_index, text)
        self.directory.note_failure(
            {
                "prompt_hash": job.prompt.hash,
                "prompt_index": job.prompt.index,
                "sample_index": job.sample_index,
                "error": text,
                "seconds": round(time.monotonic() - started, 3),
                "time": time.time(),
            }
        )

    async def _abort(self) -> None:
        agent = self.state.agent
        if agent is None or not agent.has("abort"):
            return
        try:
            async with asyncio.timeout(ABORT_TIMEOUT):
                await agent.hook("abort")(self.state.args)
        except Exception as error:
            log.warning("the agent's abort failed: %s: %s", type(error).__name__, error)


def new_sample(job: Job, samples_per_prompt: int) -> Sample:
    """The sample a generate function starts from; its parts are its own to change."""
    prompt = job.prompt
    return Sample(
        group_index=prompt.index,
        index=prompt.index * samples_per_prompt + job.sample_index,
        prompt=copy.deepcopy(prompt.messages),
        label=copy.deepcopy(prompt.label),
        metadata=copy.deepcopy(prompt.metadata),
    )


def sample_seed(seed: int, job: Job) -> int:
    """The request seed of a rollout, 31 bits: the same on every machine, whatever runs beside it."""
    text = f"{seed}/{job.prompt.index}/{job.sample_index}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def to_record(job: Job, sample: Sample, leaf_index: int, leaf_count: int) -> Record:
    """A line of `samples.jsonl`: the key, then every field of the sample."""
    key: Record = {
        "schema": 1,
        "prompt_hash": job.prompt.hash,
        "prompt_index": job.prompt.index,
        "sample_index": job.sample_index,
        "leaf_index": leaf_index,
        "leaf_count": leaf_count,
    }
    fields = sample.to_dict()
    for name in ("tokens", "loss_mask", "rollout_log_probs"):
        fields[name] = _listed(fields[name])
    return {**fields, **key}


def _listed(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


async def _all(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait for all, or for the first that raises."""
    if tasks:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
