"""Every hook a plugin may implement. This module is the contract; it only grows.

A plugin is chosen by name (`--agent NAME`), so the hooks of a chosen plugin are called on that plugin
alone. `add_arguments` and `configure_sglang` go to every plugin that the command loaded.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import argparse

    from miles_core.engine.base import Engine, EngineConfig
    from miles_core.tito.family import TitoFamily
    from miles_core.types import GenerateFnInput, GenerateFnOutput, Message, Sample

PROJECT = "miles"
"""pluggy's project name."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Decorator for a plugin's hook functions; optional on modules whose functions carry the hook's name."""

CONTRACT_VERSIONS: Mapping[str, int] = {
    "family": 1,
    "agent": 1,
    "generator": 1,
    "matcher": 1,
    "sample-hook": 1,
    "engine": 1,
}
"""The version of each kind's contract. A plugin may state the range it supports, as a module attribute
`MILES_CONTRACT = (lowest, highest)`."""


@hookspec
def tito_family() -> TitoFamily:
    """Declare a model family: the facts of its chat format and how to join turns.

    Called once, when a command selects the family. Returns a frozen `TitoFamily`. Since 0.1.
    """
    raise NotImplementedError


@hookspec
async def run_agent(
    base_url: str, prompt: list[Message], request_kwargs: dict[str, Any], metadata: dict[str, Any]
) -> dict[str, Any] | None:
    """Work on one task by talking to a model over the OpenAI chat API.

    Called once per sample, concurrently. `base_url` ends in `/sessions/<id>`; with `/v1` added it works as
    an OpenAI `base_url`. `prompt` is the sample's list of messages. `request_kwargs` are sampling
    parameters under the names of the chat-completions API, to be passed on with every request. `metadata`
    is the sample's, with `label`, `session_server_id`, `session_server_instance_id` and, if set,
    `max_seq_len`. A returned dict is merged into each output sample's metadata; its `reward` becomes the
    sample's reward. `**kwargs` is accepted. An exception costs no turn: samples are collected all the
    same. Since 0.1.
    """
    raise NotImplementedError


@hookspec
async def abort(args: Any) -> None:
    """Stop outside work of an agent; optional, beside `run_agent`.

    Called when a rollout has enough samples, after the engine's requests were aborted. `args` are the
    run's settings. Since 0.1.
    """
    raise NotImplementedError


@hookspec
async def generate(input: GenerateFnInput) -> GenerateFnOutput:
    """Turn one sample with a prompt into one or several finished samples.

    Called once per sample, concurrently. The older form `generate(args, sample, sampling_params[,
    evaluation])` is adapted when it is loaded. Since 0.1.
    """
    raise NotImplementedError


@hookspec
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Register command-line flags; optional, beside `generate` or `run_agent`.

    Called before the command line is parsed, and again for its help; values appear in `input.args`, and in what
    `configure_agent` is given. Since 0.1.
    """
    raise NotImplementedError


@hookspec
def configure_agent(args: Any) -> None:
    """Take the run's settings; optional, beside `run_agent`.

    Called once, before anything is started. `args` are the settings, with the flags that the agent registered. A
    ConfigError ends the command with its message. Since 0.1.
    """
    raise NotImplementedError


@hookspec
def message_matches(stored: Message, replayed: Message) -> bool:
    """Decide whether a message the agent sent is the stored one.

    Called for each position until the first difference, under the session's lock: it must be synchronous,
    quick and pure. Anything but True or False, or an exception, fails the request and decides nothing.
    Since 0.1.
    """
    raise NotImplementedError


@hookspec
def message_key(message: Message) -> Hashable:
    """Give what messages are sorted by: equal for any two that `message_matches` calls the same; optional.

    Called for each message of a request and of a generation in tree mode, beside `message_matches`, which is then
    asked only about messages whose keys are equal. Without it, it is asked about every branch. It must be
    synchronous, quick and pure; an exception or an unhashable key fails the request. Since 0.1.
    """
    raise NotImplementedError


@hookspec
def pick_samples(leaf_samples: list[Sample], session_metadata: dict[str, Any]) -> list[Sample]:
    """Choose which leaves of a session's tree become samples: a subset of its input, nothing rewritten.

    Called once per `POST /samples` in tree mode. Since 0.1.
    """
    raise NotImplementedError


@hookspec
def postprocess_samples(leaf_samples: list[Sample], session_metadata: dict[str, Any]) -> list[Sample]:
    """Finish the picked samples: masks of shared generations, metadata, rewards.

    Called once per `POST /samples` in tree mode, after `pick_samples`. It may change samples and leave some out, but
    where a mask is 1, token and log-probability must be those that the engine sampled there. Since 0.1.
    """
    raise NotImplementedError


@hookspec
def keep_group(args: Any, samples: Sequence[Sample]) -> bool:
    """Say whether a group of finished samples is worth training on; a sample hook of the rollout runner.

    Called once for each prompt whose rollouts are over, with one sample of each, after rewards. `args` are the run's
    settings. An object with `keep` and `reason` is taken as well. Since 0.1.
    """
    raise NotImplementedError


@hookspec
def launch_engine(config: EngineConfig) -> Engine:
    """Start what runs the model, and return a handle with its URLs.

    Called once, when a command selects the engine by name. Must return when the engine answers `/health`,
    or raise `EngineStartError` with the end of its log. Since 0.1.
    """
    raise NotImplementedError


@hookspec
def configure_sglang(server_args: Any) -> None:
    """Register a tool-call parser, reasoning parser or chat encoder that stock SGLang lacks.

    Called inside each SGLang process before it serves. `server_args` are SGLang's. Since 0.1.
    """
    raise NotImplementedError
