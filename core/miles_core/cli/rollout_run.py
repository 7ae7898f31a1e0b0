"""What `miles-plugins rollout` does: start engine and session server, run, sum up."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from miles_core.cli.output import claim_stdout
from miles_core.cli.rollout_place import Place, served
from miles_core.cli.rollout_plan import (
    Flags,
    Plan,
    args_of,
    facts_of,
    options_of,
    prepare,
    sampling_params,
    settings_of,
)
from miles_core.cli.rollout_view import Progress, print_start, print_summary, say
from miles_core.errors import ConfigError, EngineUnreachable, MilesError
from miles_core.rollout import compat
from miles_core.rollout.job import Job
from miles_core.rollout.loader import load_generate_function
from miles_core.rollout.output import DISK_TROUBLE, RunDirectory
from miles_core.rollout.runner import RolloutRunner
from miles_core.rollout.state import RolloutState
from miles_core.rollout.summary import summarize

INTERRUPTED, TERMINATED = 130, 143

WATCH_INTERVAL = 1.0
"""Seconds between looks at the engine's process."""


def run(flags: Flags, extra: Sequence[str]) -> int:
    """Do it all; returns the exit code. Raises MilesError if the folder can no longer be written to."""
    stdout = claim_stdout()
    with ExitStack() as stack:
        if flags.compat and (real := stack.enter_context(compat.enabled())) is not None:
            say(f"--compat miles: the real miles is installed ({real}) and used as it is; nothing was put in its place")
        return _prepared(prepare(flags, extra), stdout)


def _prepared(plan: Plan, stdout: Any) -> int:
    flags = plan.flags
    try:
        return _run(plan, stdout)
    except OSError as error:
        if error.errno not in DISK_TROUBLE:
            raise
        raise MilesError(
            f"--output {flags.output}: cannot be written: {error.strerror}; finished samples are kept, "
            "the same command resumes the run when there is room"
        ) from error


def _run(plan: Plan, stdout: Any) -> int:
    flags = plan.flags
    directory = RunDirectory(
        flags.output,
        settings_of(plan),
        facts=facts_of(plan),
        overwrite=flags.overwrite,
        output_format=flags.output_format,
    )
    try:
        if directory.torn:
            say(f"cut {directory.torn} bytes off samples.jsonl that an earlier run had not finished writing")
        state = RolloutState(args_of(plan), agent=plan.agent, sampling_params=sampling_params(flags))
        state.generate_fn_semaphore = asyncio.Semaphore(flags.concurrency)
        generate = load_generate_function(plan.generator)
        runner = RolloutRunner(
            state, generate, directory, options_of(flags), reward=plan.reward, keep_group=plan.keep_group
        )
        with compat.current.running(state):
            return _finish(plan, runner, directory, stdout)
    finally:
        directory.close()


def _finish(plan: Plan, runner: RolloutRunner, directory: RunDirectory, stdout: Any) -> int:
    jobs = runner.jobs(plan.prompts)
    if not jobs:
        say("every sample of this run is there already; nothing to do")
    outcome = _run_jobs(plan, runner, jobs) if jobs else Outcome()
    tally, output = runner.tally, plan.flags.output
    summary = summarize(tally, wall_time=outcome.seconds, interrupted=outcome.unfinished)
    directory.write_summary(summary)
    print_summary(summary, stdout, as_json=plan.flags.as_json)
    if outcome.unfinished:
        what, again = "interrupted", "; the same command resumes the run"
        if isinstance(outcome.error, ConfigError):  # it says what to change
            what, again = "stopped", ""
        say(f"{what}: {tally.samples} finished samples are kept{again}")
    elif tally.failures:
        what = "1 rollout" if tally.failures == 1 else f"{tally.failures} rollouts"
        say(f"{what} failed, see {output / 'failures.jsonl'}; the same command tries again")
    if outcome.error:
        raise outcome.error
    return outcome.code or int(bool(tally.failures and not tally.samples))


@dataclass
class Outcome:
    """How the rollouts went: exit code, what stopped them, and seconds without starting engine and server."""

    code: int = 0
    error: MilesError | None = None
    seconds: float = 0.0

    @property
    def unfinished(self) -> bool:
        """Whether the run stopped before its end."""
        return self.code != 0 or self.error is not None


def _run_jobs(plan: Plan, runner: RolloutRunner, jobs: Sequence[Job]) -> Outcome:
    outcome, started = Outcome(), 0.0
    with served(plan, runner.state) as place:
        print_start(plan, place, len(jobs))
        started = time.monotonic()
        try:
            before = runner.tally.rollouts
            with Progress(len(jobs), shown=not plan.flags.no_progress, before=before) as progress:
                runner.observer = progress.update
                asyncio.run(_drive(runner, jobs, place))
        except KeyboardInterrupt:
            outcome.code = INTERRUPTED
        except asyncio.CancelledError:
            outcome.code = TERMINATED
        except MilesError as error:
            outcome.error = error
        outcome.seconds = time.monotonic() - started
    return outcome


async def _drive(runner: RolloutRunner, jobs: Sequence[Job], place: Place) -> None:
    """Run until done, or until the engine that we started is gone; SIGTERM is taken like Ctrl-C."""
    task = asyncio.current_task()
    try:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel if task else lambda: None)
    except (ValueError, RuntimeError, NotImplementedError):
        pass  # not in the main thread: whoever runs us there deals with signals
    work = asyncio.create_task(runner.run(jobs))
    watch = asyncio.create_task(_watch(place))
    try:
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        engine_is_gone = watch.done()
        watch.cancel()
        if not work.done():
            work.cancel()
        await asyncio.gather(work, watch, return_exceptions=True)
    if engine_is_gone:
        watch.result()
    work.result()


async def _watch(place: Place) -> None:
    """Raise when the engine has died; wait for ever where it is not ours."""
    while True:
        if not place.alive():
            raise EngineUnreachable(f"{place.text} died; the end of {place.log} says why")
        await asyncio.sleep(WATCH_INTERVAL)
