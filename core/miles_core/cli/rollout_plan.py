"""The command line of `miles-plugins rollout`, checked and loaded before anything is started."""

from __future__ import annotations

import argparse
import difflib
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from miles_core import __version__
from miles_core.cli.flags import located, template_kwargs
from miles_core.errors import ConfigError
from miles_core.plugins import Plugin, Registry
from miles_core.rollout.data import Prompt, digest, read_prompts
from miles_core.rollout.runner import RunOptions
from miles_core.rollout.state import RolloutArgs


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
    history: str
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
        name = self.flags.checkpoint or self.flags.model
        return located(name) if name else None

    @property
    def model(self) -> str | None:
        """Where the weights are."""
        name = self.flags.model or self.flags.checkpoint
        return located(name) if name else None


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
        template_kwargs=template_kwargs(flags.apply_chat_template_kwargs),
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
        "history": flags.history,
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
