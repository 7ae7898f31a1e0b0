"""What a generate function finds in `input.state`: the run's settings, its agent, shared clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from miles_core.errors import ConfigError
from miles_core.plugins.signatures import adapted

if TYPE_CHECKING:
    import aiohttp

    from miles_core.rollout.engines import Engines
    from miles_core.tito import BoundFamily


class BoundPlugin(Protocol):
    """A loaded plugin, as the registry gives it."""

    def has(self, hook: str) -> bool:
        """Whether the plugin implements the hook."""
        ...

    def hook(self, hook: str) -> Callable[..., Any]:
        """The plugin's function for the hook."""
        ...


@dataclass(frozen=True)
class FunctionAgent:
    """An agent made of functions, for `RolloutState.agent` where none is loaded as a plugin."""

    run_agent: Callable[..., Any]
    abort: Callable[..., Any] | None = None

    def has(self, hook: str) -> bool:
        """Whether there is a function for the hook."""
        return getattr(self, hook, None) is not None and hook in ("run_agent", "abort")

    def hook(self, hook: str) -> Callable[..., Any]:
        """The function for the hook, adapted as a plugin's is. Raises PluginLoadError for what cannot be one."""
        return adapted(hook, getattr(self, hook))


@dataclass(kw_only=True)
class RolloutArgs:
    """The run's settings, `input.args`; flags that plugins registered become attributes too.

    Names are those that modules written for miles read. `session_server_url` has no trailing slash. Lengths are in
    tokens; `max_seq_len` and `rollout_max_context_len` include the prompt, the smaller one counts.
    """

    session_server_url: str = ""
    session_server_instance_id: str = ""
    session_api_key: str | None = None
    session_server_ip: str | None = None
    session_server_ports: list[int] = field(default_factory=list)
    use_session_server: str | None = None
    sglang_router_ip: str | None = None
    sglang_router_port: int | None = None
    sglang_router_policy: str | None = None
    sglang_speculative_algorithm: str | None = None
    max_seq_len: int | None = None
    rollout_max_context_len: int | None = None
    """What the engine says that its context is."""
    rollout_max_response_len: int | None = None
    rollout_temperature: float = 1.0
    rollout_top_p: float = 1.0
    rollout_top_k: int = -1
    hf_checkpoint: str | None = None
    num_layers: int | None = None
    apply_chat_template: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    partial_rollout: bool = False
    pause_generation_mode: str | None = None
    """How a trainer pauses the engine for new weights: `abort`, `retract` or `in_place`."""
    recompute_logprobs_via_prefill: bool = False
    """Whether a trainer scores the samples again with a prefill of the engine."""
    group_rm: bool = False
    use_rollout_routing_replay: bool = False
    use_rollout_indexer_replay: bool = False
    save_debug_trajectory_data: str | None = None
    custom_agent_function_path: str | None = None
    custom_generate_function_path: str | None = None
    reward_key: str | None = None
    session_collect_timeout: float = 300.0
    """Seconds that `POST /sessions/{id}/samples` may take."""

    def add(self, flags: dict[str, Any]) -> None:
        """Take over the flags that plugins registered; a name of ours is refused, unless it was left at None.

        Modules for miles register some of its own flags again: what the command line said of them stays.
        """
        for name, value in flags.items():
            if hasattr(self, name):
                if value is None:
                    continue
                raise ConfigError(f"the plugin registers a flag {name!r}, which is one of ours; rename it there")
            setattr(self, name, value)


@dataclass
class RolloutState:
    """Shared by all rollouts of a run.

    `http` is a client of the session server, open while the run lasts. `family` renders, joins and parses the model's
    chats, `engines` answer `/generate`; both are None where the run has none. `aborted` turns true when the run is
    interrupted or has enough: a generate function that loops on its own looks at it.
    """

    args: RolloutArgs
    agent: BoundPlugin | None = None
    sampling_params: dict[str, Any] = field(default_factory=dict)
    http: aiohttp.ClientSession | None = None
    family: BoundFamily | None = None
    engines: Engines | None = None
    processor: Any = None
    aborted: bool = False
    generate_fn_semaphore: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(64))

    @cached_property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer, loaded with transformers on first use.

        One that brings no chat template has the family's, so that modules that render prompts themselves can.
        """
        if not self.args.hf_checkpoint:
            raise ConfigError("this generate function needs a tokenizer: give --checkpoint")
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ConfigError(
                "this generate function needs transformers: pip install 'miles-plugins[local]'"
            ) from error
        tokenizer = AutoTokenizer.from_pretrained(self.args.hf_checkpoint)
        text = getattr(self.family and self.family.template, "text", None)  # an encoder's code is no template
        if text and not tokenizer.chat_template:
            tokenizer.chat_template = text
        return tokenizer
