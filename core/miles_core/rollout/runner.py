"""Run every prompt's rollouts concurrently; a failing one costs itself, an interrupt at most those under way."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from miles_core.errors import ConfigError, EnginesGone, PluginContractError, PluginLoadError
from miles_core.rollout.alike import Alike, RolloutFailed
from miles_core.rollout.data import Prompt
from miles_core.rollout.generation import rendered
from miles_core.rollout.groups import Group, KeepGroup, decide
from miles_core.rollout.job import NEEDS_CONTINUOUS, Job, RunOptions, encoded, new_sample, sample_seed
from miles_core.rollout.loader import Generate
from miles_core.rollout.metrics import Steps
from miles_core.rollout.outage import Outage
from miles_core.rollout.output import Record, RunDirectory
from miles_core.rollout.partial import Partials, has_nothing, is_partial
from miles_core.rollout.rewards import Reward, checked
from miles_core.rollout.state import RolloutState
from miles_core.rollout.summary import Tally
from miles_core.types import GenerateFnInput, Sample

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger(__name__)

ABORT_TIMEOUT = 30.0
"""Seconds an agent's `abort` may take."""

SHOWN_FAILURES = 10
"""More than that are only written to the file."""

_FATAL = (ConfigError, PluginLoadError, EnginesGone)
"""What ends a run, and not only a rollout."""

GRACE = 5.0
"""Seconds in which generate functions may hand back what they have, where stopped rollouts are kept."""


class RolloutRunner:
    """Runs rollouts, and writes and hands on what they give.

    `observer` is called after each rollout, with the totals so far; `deliver` with the samples of each that is kept.
    Without a `directory` nothing is written. With a filter, group rewards or `keep_groups`, the samples of a prompt
    wait for each other; of failed rollouts there are none, and the group goes on without them.

    Every rollout ends in one of five ways: its samples are kept, it failed, a filter left it out, it was aborted, or it
    was not begun. Of the aborted ones, `options.partial` keeps those that have tokens, and those whose group was not
    over.
    """

    def __init__(
        self,
        state: RolloutState,
        generate: Generate,
        directory: RunDirectory | None,
        options: RunOptions,
        observer: Callable[[Tally], None] = lambda tally: None,
        *,
        reward: Reward | None = None,
        keep_group: KeepGroup | None = None,
        deliver: Callable[[list[Sample]], Awaitable[None]] | None = None,
    ) -> None:
        if keep_group is not None and not options.continuous:
            raise ConfigError(f"--dynamic-filter: {NEEDS_CONTINUOUS}")
        self.state, self.generate, self.directory, self.options = state, generate, directory, options
        self.observer, self.reward, self.keep_group, self.deliver = observer, reward, keep_group, deliver
        self.waits = keep_group is not None or options.keep_groups is not None or bool(reward and reward.per_group)
        self.tally = Tally(reward_key=state.args.reward_key)
        self.alike, self.groups_alike = Alike(options.stop_after_failures), Alike(options.stop_after_failures)
        self.outage = Outage(state, options.engine_wait)
        self.partials: Partials | None = None
        self.steps = self._steps(directory)
        self.done: set[tuple[str, int, int]] = set()
        self._groups: dict[int, Group] = {}
        self._over: set[tuple[str, int]] = set()
        self._busy: set[asyncio.Task[None] | None] = set()
        self._under_way: set[tuple[str, int, int]] = set()
        self._took: dict[tuple[str, int, int], float] = {}
        self._enough = asyncio.Event()
        self._writes: set[asyncio.Task[None]] = set()
        self._admission = asyncio.Semaphore(options.groups_at_once) if options.groups_at_once else None
        if options.partial:
            if directory is None:
                raise ConfigError("--partial-rollout keeps rollouts in the output folder, and there is none")
            self.partials = Partials(directory)
        if directory is not None:
            self._read(directory)

    def _steps(self, directory: RunDirectory | None) -> Steps:
        size = self.options.metrics_prompts * self.options.samples_per_prompt
        if directory is None:
            return Steps(size, lambda line: None)
        return Steps(size, directory.note_metrics, first=directory.steps(), reward_key=self.state.args.reward_key)

    def _read(self, directory: RunDirectory) -> None:
        """What an earlier run has finished, and which groups it has left out."""
        for record in directory.records():
            self.done.add((record["prompt_hash"], record["prompt_index"], record["sample_index"]))
            self._over.add((record["prompt_hash"], record["prompt_index"]))
            self.tally.add(record, resumed=True)
        self.tally.groups_kept = len(self._over)
        for note in directory.filtered():
            self._over.add((note["prompt_hash"], note["prompt_index"]))
            self.tally.groups_filtered += 1
            self.tally.filtered_rollouts += note["rollouts"]
        if self.partials is not None:
            self.partials.drop_where(lambda key: key in self.done or (self.waits and key[:2] in self._over))

    def jobs(self, prompts: Iterable[Prompt]) -> list[Job]:
        """What is left to do: each prompt's samples side by side, in the prompts' order, those to go on with first.

        Where samples wait for each other, a prompt that has any is done.
        """
        if self._has_enough():
            return []
        begun = self.partials.prompts if self.partials is not None else set()
        ordered = sorted(prompts, key=lambda prompt: (prompt.hash, prompt.index) not in begun)
        jobs = (Job(prompt, at) for prompt in ordered for at in range(self.options.samples_per_prompt))
        if not self.waits:
            return [job for job in jobs if job.key not in self.done]
        return [job for job in jobs if job.key[:2] not in self._over]

    async def run(self, jobs: Sequence[Job]) -> None:
        """Do all jobs; cancelling it stops those under way, keeps what is finished, and calls the agent's abort."""
        import aiohttp

        self.state.aborted = False  # of an earlier run with this state
        self.tally.not_begun = len(jobs)
        self.steps.start()
        for job in jobs:
            group = self._groups.setdefault(job.prompt.index, Group(0, 0))
            group.size, group.due = group.size + 1, group.due + 1
            self.steps.expect(job.prompt.index)
        waiting = iter(jobs)
        timeout = aiohttp.ClientTimeout(total=None, connect=60)
        # shorter than the server keeps a connection: an agent may think for exactly that long
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
            self._share(http)
            workers = min(self.options.concurrency, len(jobs))
            tasks = [asyncio.create_task(self._work(waiting)) for _ in range(workers)]
            enough = asyncio.create_task(self._enough.wait())
            try:
                await _all(tasks, enough)
                await asyncio.gather(*self._writes)
            finally:
                self.state.aborted = True
                if self.partials is not None:
                    await self._let_return(tasks)
                await _cancel([*tasks, enough, *self._writes])
                await self.outage.close()
                self._account()
                await self._abort()
                self._share(None)

    async def _let_return(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Have the engines stop, and generate functions hand back what they have."""
        left = [task for task in tasks if task in self._busy]
        if not left:
            return
        if self.state.engines is not None:
            await self.state.engines.stop()
        await asyncio.wait(left, timeout=GRACE)

    def _account(self) -> None:
        """Note what becomes of rollouts that are not finished."""
        stopped = self.tally.running + self._waiting()
        self.tally.aborted += stopped
        self.tally.running = 0
        self.steps.aborted(stopped)
        self.steps.close()
        if self.partials is not None:
            for job, samples, _ in [entry for group in self._groups.values() for entry in group.finished]:
                self.tally.partial += self.partials.keep(job, samples)
            self.partials.write()

    def _waiting(self) -> int:
        """Rollouts that are over, and whose group will not be."""
        return sum(len(group.finished) for group in self._groups.values())

    def _has_enough(self) -> bool:
        wanted = self.options.keep_groups
        return wanted is not None and self.tally.groups_kept >= wanted

    def _share(self, http: aiohttp.ClientSession | None) -> None:
        self.state.http = http
        if self.state.engines is not None:
            self.state.engines.http = http
            self.state.engines.resume()

    async def _work(self, waiting: Iterator[Job]) -> None:
        for job in waiting:
            if self.state.aborted:
                return
            group = self._groups[job.prompt.index]
            await self._admit(group)
            self._under_way.add(job.key)
            self.tally.running = len(self._under_way)
            self.tally.not_begun -= 1
            self._busy.add(asyncio.current_task())
            await self._do(job, group)
            self._is_over(job.key)
            if group.settled:
                await self._settle(group)
            self._busy.discard(asyncio.current_task())
            self.observer(self.tally)
            self.alike.check()
            self.groups_alike.check()

    def _is_over(self, key: tuple[str, int, int]) -> None:
        """A rollout has come to an end and been counted."""
        self._under_way.discard(key)
        self.tally.running = len(self._under_way)

    async def _admit(self, group: Group) -> None:
        """Wait until there is room for one more group; its other rollouts then come in with it."""
        if self._admission is None or group.admitted:
            return
        async with group.lock:
            if not group.admitted:
                await self._admission.acquire()
                group.admitted = True

    async def _do(self, job: Job, group: Group) -> None:
        """One rollout; only a fault of the run itself (configuration, plugins, disk, no engine left) gets out."""
        started = time.monotonic()
        try:
            samples = await self._in_spite_of_outages(job, started)
            self._took[job.key] = time.monotonic() - started
            held = self._is_held(samples)
            written = None if self.waits or held else encoded([(job, samples, started)])
        except _FATAL:
            raise
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            self._fail(job, RolloutFailed("the rollout cancelled itself"), started)
        except (Exception, SystemExit) as error:
            self._fail(job, error, started)
        else:
            if not has_nothing(samples):
                self.alike.succeeded()
            if held:
                self._hold(job, samples, group)
            elif written is None:
                group.finished.append((job, samples, started))
            else:
                self._take(*written)
                await self._hand_on(samples)
        group.due -= 1

    def _hold(self, job: Job, samples: list[Sample], group: Group) -> None:
        """Keep an aborted rollout for a later run, if it has tokens; its group then is not over in this one."""
        group.held = True
        self.tally.aborted += 1
        if self.partials is not None and is_partial(samples):
            self.tally.partial += self.partials.keep(job, samples)
        self.steps.aborted()

    def _is_held(self, samples: Sequence[Sample]) -> bool:
        """Whether a rollout came back unfinished, for a later run to go on with, or to begin."""
        return (self.partials is not None and is_partial(samples)) or (self.state.aborted and has_nothing(samples))

    async def _settle(self, group: Group) -> None:
        """All rollouts of a group are over: reward it, and keep it or leave it out."""
        if self._admission is not None:
            self._admission.release()
        if not self.waits or group.held or not group.finished or self._enough.is_set():
            return
        try:
            if self.reward is not None and self.reward.per_group:
                await self.reward.score_group(self.state.args, self._one_each(group))
            kept, reason = (True, "")
            if self.keep_group is not None:
                kept, reason = decide(self.keep_group, self.state.args, group.samples)
            records, lines = encoded(group.finished, together=True)
        except (ConfigError, PluginContractError):
            raise
        except Exception as error:
            finished, group.finished = group.finished, []
            for job, _, started in finished:
                self._fail(job, error, started, self.groups_alike)
            return
        if self._enough.is_set():
            return
        finished, group.finished = group.finished, []
        if not kept:
            self._leave_out(finished[0][0].prompt, [len(samples) for _, samples, _ in finished], reason)
            return
        self.tally.groups_kept += 1
        if self._has_enough():
            self._enough.set()
        # a task of its own: when there is enough, the workers are stopped, and what is being kept is kept whole
        samples = [each for _, found, _ in finished for each in found]
        self._take(records, lines)
        self._writes.add(write := asyncio.create_task(self._hand_on(samples)))
        await asyncio.shield(write)
        self._writes.discard(write)

    def _one_each(self, group: Group) -> list[Sample]:
        if any(len(samples) > 1 for _, samples, _ in group.finished):
            raise ConfigError(
                "group rewards are computed of one sample per rollout, and a rollout gave several leaves: "
                "use --history linear, or a reward function without --group-reward"
            )
        return group.samples

    def _take(self, records: Sequence[Record], lines: bytes) -> None:
        """Count samples that are kept; from here on they get to the disk, whatever is cancelled."""
        for record in records:
            self.tally.add(record)
        keys = {(each["prompt_hash"], each["prompt_index"], each["sample_index"]): None for each in records}
        for key in keys:
            self._is_over(key)
            self._drop_partial(key)
        self.steps.kept(records, [self._took.pop(key, 0.0) for key in keys])
        self.groups_alike.succeeded()
        if self.directory is not None:
            self.directory.add_lines(lines)

    async def _hand_on(self, samples: list[Sample]) -> None:
        """Wait until samples that were taken are on disk, and hand them on."""
        if self.directory is not None:
            await self.directory.flush()
        if self.deliver is not None:
            await self.deliver(samples)

    def _drop_partial(self, key: tuple[str, int, int]) -> None:
        if self.partials is not None:
            self.partials.drop(key)

    def _leave_out(self, prompt: Prompt, leaves: Sequence[int], reason: str) -> None:
        self.tally.groups_filtered += 1
        self.tally.filtered_rollouts += len(leaves)
        self.steps.group_left_out(prompt.index, len(leaves))
        self.groups_alike.succeeded()
        for at in range(self.options.samples_per_prompt):
            self._drop_partial(Job(prompt, at).key)
        if self.directory is not None:
            note = {"prompt_hash": prompt.hash, "prompt_index": prompt.index, "rollouts": len(leaves)}
            self.directory.note_filtered({**note, "samples": sum(leaves), "reason": reason, "time": time.time()})

    async def _in_spite_of_outages(self, job: Job, started: float) -> list[Sample]:
        """One rollout, begun anew if it fails and no engine answered meanwhile; once, lest it be what kills engines."""
        try:
            return await self._rollout(job)
        except _FATAL:
            raise
        except (Exception, SystemExit):
            if self.state.aborted or not await self.outage.was(started):
                raise
        return await self._rollout(job)

    async def _rollout(self, job: Job) -> list[Sample]:
        begun = self.partials.start(job.key) if self.partials is not None else None
        if begun is not None and not is_partial(begun):
            return begun  # it was over, and its group was not
        sample = begun[0] if begun else new_sample(job, self.options.samples_per_prompt)
        try:
            return await self._generated(job, sample)
        except asyncio.CancelledError:
            if self.partials is not None and is_partial([sample]):
                self.tally.partial += self.partials.keep(job, [sample])
            raise

    async def _generated(self, job: Job, sample: Sample) -> list[Sample]:
        if self.state.args.apply_chat_template:
            sample.prompt = rendered(self.state, sample)
        params = dict(self.state.sampling_params)
        if self.options.seed is not None:
            params["sampling_seed"] = sample_seed(self.options.seed, job)
        limit = self.options.sample_timeout
        try:
            async with asyncio.timeout(limit) as clock:
                output = await self.generate(GenerateFnInput(self.state, sample, params))
                samples = output.as_list()
                for each in samples:
                    each.validate()
                    if self.reward is not None and not self.reward.per_group:
                        await self.reward.score(self.state.args, each)
        except TimeoutError as error:
            if clock.expired():
                raise RolloutFailed(f"not finished within {limit:g} s (--sample-timeout)") from error
            raise
        for each in samples:
            each.reward = checked(each.reward)
        if has_nothing(samples) and not self.state.aborted:
            raise RolloutFailed(str(samples[0].metadata.get("agent_error") or "aborted before its first turn"))
        return samples

    def _fail(self, job: Job, error: BaseException, started: float, alike: Alike | None = None) -> None:
        self.tally.failures += 1
        self.steps.failed(job.prompt.index)
        self._drop_partial(job.key)
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, RolloutFailed):
            text = error.message
        (alike or self.alike).failed(text, started)
        level = logging.WARNING if self.tally.failures <= SHOWN_FAILURES else logging.DEBUG
        log.log(level, "prompt %d sample %d failed: %s", job.prompt.index, job.sample_index, text)
        if self.directory is None:
            return
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


async def _all(tasks: Sequence[asyncio.Task[None]], enough: asyncio.Task[Any]) -> None:
    """Wait for all, for the first that raises, or until there is enough."""
    left: set[asyncio.Task[Any]] = set(tasks)
    while left:
        done, _ = await asyncio.wait([*left, enough], return_when=asyncio.FIRST_COMPLETED)
        for task in done & left:
            task.result()
        left -= done
        if enough in done:
            return


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
