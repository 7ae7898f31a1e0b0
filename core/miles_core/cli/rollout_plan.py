"""The command line of `miles-plugins rollout`, checked and loaded before anything is started."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from miles_core import __version__
from miles_core.cli.flags import check_is_no_address, located, template_kwargs
from miles_core.cli.plugin_flags import parse_plugin_flags
from miles_core.errors import ConfigError
from miles_core.plugins import Plugin, Registry
from miles_core.rollout.compat import selector
from miles_core.rollout.data import Keys, Prompt, digest, read_prompts
from miles_core.rollout.generation import check_sessions, check_tree
from miles_core.rollout.job import NEEDS_CONTINUOUS, RunOptions
from miles_core.rollout.rewards import Reward
from miles_core.rollout.state import RolloutArgs


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The command line, parsed."""

    prompts: Path
    input_key: str | None
    label_key: str | None
    metadata_key: str | None
    agent: str | None
    generate: str
    compat: str | None
    samples_per_prompt: int
    reward_function: str | None
    group_reward: bool
    reward_key: str | None
    dynamic_filter: str | None
    keep_groups: int | None
    groups_at_once: int | None
    limit: int | None
    output: Path
    output_format: str
    overwrite: bool
    partial_rollout: bool
    pause_generation_mode: str | None
    recompute_logprobs_via_prefill: bool
    stop_after_failures: int
    engine_wait: float
    metrics_prompts: int
    tito_model: str | None
    engines: tuple[str, ...]
    model: str | None
    checkpoint: str | None
    chat_template_path: Path | None
    strict_template: bool
    apply_chat_template: bool
    apply_chat_template_kwargs: str | None
    message_matcher: str
    history: str
    pick_samples: str
    postprocess_samples: str
    session_server_url: str | None
    api_key: str | None
    max_seq_len: int | None
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    concurrency: int
    engine_concurrency: int | None
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
    """Values of the flags that the plugins registered."""
    reward: Reward | None = None
    keep_group: Callable[..., Any] | None = None
    engine_flags: tuple[str, ...] = ()
    """Words of the command line that go to the engine that is started."""

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
    if flags.compat:
        flags = replace(
            flags,
            generate=selector("generator", flags.generate),
            pick_samples=selector("sample-hook", flags.pick_samples),
            postprocess_samples=selector("sample-hook", flags.postprocess_samples),
        )
    registry = Registry.discover()
    starts_engine = any("://" not in engine for engine in flags.engines)
    generator = registry.load("generator", flags.generate)
    agent = registry.load("agent", flags.agent) if flags.agent else None
    values, engine_flags = parse_plugin_flags([generator, *([agent] if agent else [])], extra, for_engine=starts_engine)
    plan = Plan(
        flags=flags,
        prompts=(prompts := read_prompts(flags.prompts, _keys(flags)))[: flags.limit],
        prompts_digest=digest(prompts),
        agent=agent,
        generator=generator,
        engine=None,
        template_kwargs=template_kwargs(flags.apply_chat_template_kwargs),
        extra=values,
        engine_flags=engine_flags,
    )
    if agent is None and _is_agentic(generator):
        raise ConfigError("--generate agentic needs an agent: give --agent NAME, for example --agent calculator")
    _check_groups(plan, registry)
    if agent and agent.has("configure_agent"):
        agent.call("configure_agent", args_of(plan))
    args = args_of(plan)
    (check_sessions if _is_agentic(generator) else check_tree)(args)
    if flags.apply_chat_template and flags.session_server_url:
        raise ConfigError(
            "--apply-chat-template needs the model family here, and --session-server-url has it\n  use --engine instead"
        )
    if flags.session_server_url:
        if flags.engines:
            raise ConfigError("--session-server-url has an engine already: leave out --engine")
    else:
        with _named_as_given(flags):
            plan.engine = _check_model(plan, registry)
    return plan


def _is_agentic(generator: Plugin) -> bool:
    """Whether it works with sessions, however it was named."""
    return generator.record.builtin and generator.record.name == "agentic"


def _keys(flags: Flags) -> Keys | None:
    given = (flags.input_key, flags.label_key, flags.metadata_key)
    return Keys(*given) if any(given) else None


def _check_groups(plan: Plan, registry: Registry) -> None:
    """Load what rewards and chooses groups. Raises ConfigError for flags that do not go together."""
    flags = plan.flags
    if flags.group_reward and flags.reward_function is None:
        raise ConfigError("--group-reward says how the reward function is called: give --reward-function PATH")
    options_of(flags)
    if flags.reward_function:
        plan.reward = Reward.load(flags.reward_function, per_group=flags.group_reward)
    if flags.dynamic_filter:
        if not continuous():
            raise ConfigError(f"--dynamic-filter {flags.dynamic_filter}: {NEEDS_CONTINUOUS}")
        plan.keep_group = registry.load("sample-hook", flags.dynamic_filter, hook="keep_group").hook("keep_group")


def continuous() -> bool:
    """Whether the environment asks for the scheduler that finishes groups as they come."""
    return os.environ.get("MILES_EXPERIMENTAL_ROLLOUT_REFACTOR", "") == "1"


@contextmanager
def _named_as_given(flags: Flags) -> Iterator[None]:
    """A checkpoint that was given as --model is called so in errors."""
    try:
        yield
    except ConfigError as error:
        if flags.checkpoint or isinstance(error, _NoCheckpoint) or "--checkpoint" not in error.message:
            raise
        raise ConfigError(error.message.replace("--checkpoint", "--model", 1)) from error


class _NoCheckpoint(ConfigError):
    """Neither flag was given, so neither is meant by the other's name."""


def _check_model(plan: Plan, registry: Registry) -> Plugin | None:
    """Load family, matcher and tokenizer as the server will; returns the engine to start, if any."""
    from miles_core.plugins.families import family_of, resolve
    from miles_core.tito import load_tokenizer
    from miles_core.tito.drift import check_template

    flags = plan.flags
    if not flags.engines:
        raise ConfigError("no engine: give --engine local, --engine URL, or --session-server-url URL")
    if not flags.tito_model:
        raise ConfigError(
            "no model family: give --tito-model NAME (auto finds it, default follows the checkpoint's own template)"
        )
    if plan.checkpoint is None:
        raise _NoCheckpoint(
            "no checkpoint: give --checkpoint DIR for the tokenizer, or --model DIR where an engine is started too"
        )
    registry.load("matcher", flags.message_matcher)
    if flags.history == "tree":
        registry.load("sample-hook", flags.pick_samples, hook="pick_samples")
        registry.load("sample-hook", flags.postprocess_samples, hook="postprocess_samples")
    # what was found is what the run is recorded with, and what its samples are read with later
    plan.flags = flags = replace(flags, tito_model=resolve(registry, flags.tito_model, plan.checkpoint))
    family = registry.load("family", str(flags.tito_model))
    facts = family_of(family)
    facts.revision(family.revision)
    tokenizer = load_tokenizer(plan.checkpoint)
    if not facts.best_effort:
        bound = facts.bind(tokenizer, family.revision)
        if flags.strict_template:  # the server warns of it otherwise
            check_template(bound, strict=True)
    if flags.chat_template_path and not flags.chat_template_path.is_file():
        raise ConfigError(f"--chat-template-path {flags.chat_template_path}: there is no such file")
    names = [engine for engine in flags.engines if "://" not in engine]
    for name in names:
        check_is_no_address(name)
    if names and len(flags.engines) > 1:
        raise ConfigError(f"--engine {names[0]}: one engine is started by name, or several are given by URL")
    return registry.load("engine", names[0]) if names else None


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
        partial=flags.partial_rollout,
        stop_after_failures=flags.stop_after_failures or None,
        engine_wait=flags.engine_wait,
        metrics_prompts=flags.metrics_prompts,
        continuous=continuous(),
        keep_groups=flags.keep_groups,
        groups_at_once=flags.groups_at_once,
    )


def args_of(plan: Plan) -> RolloutArgs:
    """`input.args`, apart from the session server's address, which is not known yet."""
    args = RolloutArgs(
        session_api_key=plan.flags.api_key if plan.flags.session_server_url else None,
        max_seq_len=plan.flags.max_seq_len,
        hf_checkpoint=plan.checkpoint,
        apply_chat_template=plan.flags.apply_chat_template,
        partial_rollout=plan.flags.partial_rollout,
        pause_generation_mode=plan.flags.pause_generation_mode,
        recompute_logprobs_via_prefill=plan.flags.recompute_logprobs_via_prefill,
        group_rm=plan.flags.group_reward,
        chat_template_kwargs=plan.template_kwargs,
        reward_key=plan.flags.reward_key,
        rollout_max_response_len=plan.flags.max_tokens,
        rollout_temperature=plan.flags.temperature,
        rollout_top_p=plan.flags.top_p,
        rollout_top_k=plan.flags.top_k,
        use_session_server="v2" if plan.flags.history == "tree" else "v1",
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
        "sample_hooks": [flags.pick_samples, flags.postprocess_samples] if flags.history == "tree" else None,
        "max_seq_len": flags.max_seq_len,
        "sampling_params": sampling_params(flags),
        "seed": flags.seed,
        "reward_function": flags.reward_function,
        "group_reward": flags.group_reward or None,
        "dynamic_filter": flags.dynamic_filter,
        "apply_chat_template": flags.apply_chat_template or None,
        "kept_by_group": flags.keep_groups is not None or None,
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
