"""What `miles-plugins rollout` does: check everything, start engine and session server, run, sum up."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from miles_core import __version__
from miles_core.cli.output import claim_stdout
from miles_core.cli.rollout_view import Progress, print_start, print_summary, say
from miles_core.engine.base import EngineConfig
from miles_core.errors import ConfigError, EngineUnreachable, MilesError
from miles_core.plugins import Plugin, Registry
from miles_core.rollout.data import Prompt, digest, read_prompts
from miles_core.rollout.loader import load_generate_function
from miles_core.rollout.output import RunDirectory
from miles_core.rollout.runner import Job, RolloutRunner, RunOptions
from miles_core.rollout.state import RolloutArgs, RolloutState
from miles_core.rollout.summary import summarize

if TYPE_CHECKING:
    from miles_core.server.settings import ServerSettings

INTERRUPTED, TERMINATED = 130, 143

WATCH_INTERVAL = 1.0
"""Seconds between looks at the engine's process."""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The command line, parsed."""

    prompts: Path
    agent: str | None
    generate: str
    samples_per_prompt: int
    limit: int | None
    output: Path
    overwrite: bool
    tito_model: str | None
    engines: tuple[str, ...]
    model: str | None
    checkpoint: str | None
    chat_template_path: Path | None
    apply_chat_template_kwargs: str | None
    message_matcher: str
    session_server_url: str | None
    api_key: str | None
    max_seq_len: int | None
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    concurrency: int
    sample_timeout: float
    no_progress: bool
    as_json: bool


@dataclass
class Plan:
    """Everything a run needs, checked before anything is started."""

    flags: Flags
    prompts: list[Prompt]
    prompts_digest: str
    agent: Plugin | None
    generator: Plugin
    engine: Plugin | None
    template_kwargs: dict[str, Any]
    extra: dict[str, Any]
    """Values of the flags that the generate function registered."""

    @property
    def checkpoint(self) -> str | None:
        """Where the tokenizer is; a directory as an absolute path."""
        return _located(self.flags.checkpoint or self.flags.model)

    @property
    def model(self) -> str | None:
        """Where the weights are."""
        return _located(self.flags.model or self.flags.checkpoint)


def run(flags: Flags, extra: Sequence[str]) -> int:
    """Do it all; returns the exit code."""
    stdout = claim_stdout()
    plan = prepare(flags, extra)
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


# -- checks --------------------------------------------------------------------------------------------------


def prepare(flags: Flags, extra: Sequence[str]) -> Plan:
    """Read and load everything named on the command line; whatever is wrong with it is an error here."""
    registry = Registry.discover()
    generator = registry.load("generator", flags.generate)
    plan = Plan(
        flags=flags,
        prompts=(prompts := read_prompts(flags.prompts))[: flags.limit],
        prompts_digest=digest(prompts),
        agent=registry.load("agent", flags.agent) if flags.agent else None,
        generator=generator,
        engine=None,
        template_kwargs=_template_kwargs(flags.apply_chat_template_kwargs),
        extra=_extra_flags(generator, extra),
    )
    if flags.agent is None and flags.generate == "agentic":
        raise ConfigError("--generate agentic needs an agent: give --agent NAME, for example --agent calculator")
    if flags.session_server_url:
        if flags.engines:
            raise ConfigError("--session-server-url has an engine already: leave out --engine")
    else:
        plan.engine = _check_model(plan, registry)
    return plan


def _check_model(plan: Plan, registry: Registry) -> Plugin | None:
    """Load family, matcher and tokenizer as the server will; returns the engine to start, if any."""
    from miles_core.tito import load_tokenizer

    flags = plan.flags
    if not flags.engines:
        raise ConfigError("no engine: give --engine local, --engine URL, or --session-server-url URL")
    if not flags.tito_model:
        raise ConfigError("no model family: give --tito-model NAME (or default, for the checkpoint's own template)")
    if plan.checkpoint is None:
        raise ConfigError("no checkpoint: give --model, and --checkpoint if the tokenizer is elsewhere")
    registry.load("matcher", flags.message_matcher)
    family = registry.load("family", flags.tito_model)
    family.call("tito_family").revision(family.revision)
    load_tokenizer(plan.checkpoint)
    if flags.chat_template_path and not flags.chat_template_path.is_file():
        raise ConfigError(f"--chat-template-path {flags.chat_template_path}: there is no such file")
    names = [engine for engine in flags.engines if "://" not in engine]
    if names and len(flags.engines) > 1:
        raise ConfigError(f"--engine {names[0]}: one engine is started by name, or several are given by URL")
    return registry.load("engine", names[0]) if names else None


def _template_kwargs(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"--apply-chat-template-kwargs {text}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(
            f'--apply-chat-template-kwargs {text}: not an object; for example {{"enable_thinking": false}}'
        )
    return value


def _extra_flags(generator: Plugin, extra: Sequence[str]) -> dict[str, Any]:
    """Parse what click left over with the flags that the generate function registers."""
    parser = argparse.ArgumentParser(prog="miles-plugins rollout", add_help=False, exit_on_error=False)
    if generator.has("add_arguments"):
        generator.call("add_arguments", parser)
    try:
        values, unknown = parser.parse_known_args(list(extra))
    except argparse.ArgumentError as error:
        raise click.UsageError(f"{generator.describe()}: {error}") from error
    if unknown:
        ctx = click.get_current_context(silent=True)
        known = [name for param in ctx.command.params for name in param.opts] if ctx else []
        if unknown[0].startswith("-"):
            raise click.NoSuchOption(unknown[0].partition("=")[0], possibilities=_close(unknown[0], known))
        raise click.UsageError(f"Got unexpected extra argument ({unknown[0]})")
    return vars(values)


def _close(name: str, known: Sequence[str]) -> list[str]:
    import difflib

    return difflib.get_close_matches(name, known)


# -- the run's settings --------------------------------------------------------------------------------------


def sampling_params(flags: Flags) -> dict[str, Any]:
    """What every rollout starts from."""
    params: dict[str, Any] = {"temperature": flags.temperature, "top_p": flags.top_p, "top_k": flags.top_k}
    if flags.max_tokens is not None:
        params["max_new_tokens"] = flags.max_tokens
    return params


def options_of(flags: Flags) -> RunOptions:
    """The runner's part of the flags."""
    return RunOptions(
        samples_per_prompt=flags.samples_per_prompt,
        concurrency=flags.concurrency,
        sample_timeout=flags.sample_timeout,
        seed=flags.seed,
    )


def args_of(plan: Plan) -> RolloutArgs:
    """`input.args`, apart from the session server's address, which is not known yet."""
    args = RolloutArgs(
        session_api_key=plan.flags.api_key if plan.flags.session_server_url else None,
        max_seq_len=plan.flags.max_seq_len,
        hf_checkpoint=plan.checkpoint,
        custom_agent_function_path=plan.flags.agent,
        custom_generate_function_path=plan.flags.generate,
    )
    args.add(plan.extra)
    return args


def settings_of(plan: Plan) -> dict[str, Any]:
    """What must be the same for samples to belong to one run; how many and how fast is free, but for groups."""
    flags = plan.flags
    template = flags.chat_template_path
    return {
        "prompts_sha256": plan.prompts_digest,
        "agent": flags.agent,
        "generate": flags.generate,
        "generate_flags": {key: str(value) for key, value in plan.extra.items()},
        "samples_per_prompt": flags.samples_per_prompt,
        "tito_model": flags.tito_model,
        "model": plan.model,
        "checkpoint": plan.checkpoint,
        "chat_template_sha256": hashlib.sha256(template.read_bytes()).hexdigest() if template else None,
        "chat_template_kwargs": plan.template_kwargs,
        "message_matcher": flags.message_matcher,
        "max_seq_len": flags.max_seq_len,
        "sampling_params": sampling_params(flags),
        "seed": flags.seed,
    }


def facts_of(plan: Plan) -> dict[str, Any]:
    """What is worth knowing later, and may change when a run is resumed."""
    flags = plan.flags
    return {
        "version": __version__,
        "prompts": str(flags.prompts.resolve()),
        "engine": list(flags.engines) or [flags.session_server_url],
        "agent": plan.agent.describe() if plan.agent else None,
        "generator": plan.generator.describe(),
        "started": time.time(),
    }


def _located(name: str | None) -> str | None:
    return str(Path(name).resolve()) if name and Path(name).is_dir() else name


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
