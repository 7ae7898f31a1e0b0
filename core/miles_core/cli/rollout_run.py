"""What `miles-plugins rollout` does: start engine and session server, run, sum up."""

from __future__ import annotations

import asyncio
import errno
import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.cli.output import claim_stdout
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
from miles_core.engine.base import EngineConfig
from miles_core.errors import ConfigError, EngineUnreachable, MilesError
from miles_core.rollout.loader import load_generate_function
from miles_core.rollout.output import RunDirectory
from miles_core.rollout.runner import Job, RolloutRunner
from miles_core.rollout.state import RolloutArgs, RolloutState
from miles_core.rollout.summary import summarize

if TYPE_CHECKING:
    from miles_core.server.settings import ServerSettings

INTERRUPTED, TERMINATED = 130, 143

WATCH_INTERVAL = 1.0
"""Seconds between looks at the engine's process."""


DISK_TROUBLE = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS, errno.EIO)
"""What a full or failing disk answers."""


def run(flags: Flags, extra: Sequence[str]) -> int:
    """Do it all; returns the exit code. Raises MilesError if the folder can no longer be written to."""
    stdout = claim_stdout()
    plan = prepare(flags, extra)
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
    directory = RunDirectory(flags.output, settings_of(plan), facts=facts_of(plan), overwrite=flags.overwrite)
    try:
        if directory.torn:
            say(f"cut {directory.torn} bytes off samples.jsonl that an earlier run had not finished writing")
        state = RolloutState(args_of(plan), agent=plan.agent, sampling_params=sampling_params(flags))
        state.generate_fn_semaphore = asyncio.Semaphore(flags.concurrency)
        runner = RolloutRunner(state, load_generate_function(plan.generator), directory, options_of(flags))
        return _finish(plan, runner, stdout)
    finally:
        directory.close()


def _finish(plan: Plan, runner: RolloutRunner, stdout: Any) -> int:
    jobs = runner.jobs(plan.prompts)
    if not jobs:
        say("every sample of this run is there already; nothing to do")
    outcome = _run_jobs(plan, runner, jobs) if jobs else Outcome()
    tally, output = runner.tally, plan.flags.output
    summary = summarize(tally, wall_time=outcome.seconds, interrupted=outcome.unfinished)
    runner.directory.write_summary(summary)
    print_summary(summary, stdout, as_json=plan.flags.as_json)
    if outcome.unfinished:
        say(f"interrupted: {tally.samples} finished samples are kept; the same command resumes the run")
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
    with _served(plan, runner.state.args) as place:
        print_start(plan, place, len(jobs))
        started = time.monotonic()
        try:
            with Progress(len(jobs), shown=not plan.flags.no_progress) as progress:
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


# -- engine and session server -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where session server and engine are, in words; whether the engine lives, and its log, where it is ours."""

    text: str
    alive: Callable[[], bool] = lambda: True
    log: Path | None = None


@contextmanager
def _served(plan: Plan, args: RolloutArgs) -> Iterator[Place]:
    """Have a session server, ours or a given one, and note its address in `args`."""
    if plan.flags.session_server_url:
        args.session_server_url = plan.flags.session_server_url.rstrip("/")
        args.session_server_instance_id = _instance_id(args.session_server_url)
        yield Place(f"session server {args.session_server_url}")
        return
    from miles_core.server.app import ServerThread

    with ExitStack() as stack:
        urls, place = _launch(plan, stack)
        server = stack.enter_context(ServerThread(_server_settings(plan, urls)))
        args.session_server_url = server.url
        args.session_server_instance_id = server.instance_id
        yield place


def _launch(plan: Plan, stack: ExitStack) -> tuple[tuple[str, ...], Place]:
    """Start the engine that is named, or take the given URLs."""
    if plan.engine is None:
        urls = tuple(url.rstrip("/") for url in plan.flags.engines)
        return urls, Place(", ".join(urls))
    config = EngineConfig(
        model=str(plan.model),
        checkpoint=str(plan.checkpoint),
        tito_model=str(plan.flags.tito_model),
        log_file=plan.flags.output / "engine.log",
        progress=say,
    )
    engine = plan.engine.call("launch_engine", config)
    stack.callback(engine.close)
    text = f"{plan.engine.describe()} at {', '.join(engine.urls)}"
    return tuple(engine.urls), Place(text, engine.alive, config.log_file)


def _server_settings(plan: Plan, urls: tuple[str, ...]) -> ServerSettings:
    from miles_core.server.settings import ServerSettings

    template = plan.flags.chat_template_path
    return ServerSettings(
        checkpoint=str(plan.checkpoint),
        tito_model=str(plan.flags.tito_model),
        engine_urls=urls,
        message_matcher=plan.flags.message_matcher,
        history=plan.flags.history,
        chat_template_kwargs=plan.template_kwargs,
        chat_template_path=str(template) if template else None,
        host="127.0.0.1",
        port=0,
    )


def _instance_id(url: str) -> str:
    """Ask a running session server who it is."""
    from urllib.error import URLError
    from urllib.request import urlopen

    try:
        with urlopen(f"{url}/health", timeout=10) as reply:
            return str(json.loads(reply.read())["session_server_instance_id"])
    except (URLError, OSError) as error:
        raise MilesError(f"--session-server-url {url}: no answer: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--session-server-url {url}: its /health is not that of a session server") from error
