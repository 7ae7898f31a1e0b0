"""What a generate function finds in `input.state`: the run's settings, its agent, shared clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from miles_core.errors import ConfigError

if TYPE_CHECKING:
    import aiohttp


class BoundPlugin(Protocol):
    """A loaded plugin, as the registry gives it."""

    def has(self, hook: str) -> bool:
        """Whether the plugin implements the hook."""
        ...

    def hook(self, hook: str) -> Callable[..., Any]:
        """The plugin's function for the hook."""
        ...


@dataclass(kw_only=True)
class RolloutArgs:
    """The run's settings, `input.args`; flags that a generate function registered become attributes too.

    `session_server_url` has no trailing slash. `max_seq_len` is in tokens, prompt included.
    """

    session_server_url: str = ""
    session_server_instance_id: str = ""
    session_api_key: str | None = None
    max_seq_len: int | None = None
    hf_checkpoint: str | None = None
    custom_agent_function_path: str | None = None
    custom_generate_function_path: str | None = None
    reward_key: str | None = None
    session_collect_timeout: float = 300.0
    """Seconds that `POST /sessions/{id}/samples` may take."""

    def add(self, flags: dict[str, Any]) -> None:
        """Take over the flags that a generate function registered; a name of ours is refused."""
        for name, value in flags.items():
            if hasattr(self, name):
                raise ConfigError(f"the generate function registers a flag {name!r}, which is one of ours")
            setattr(self, name, value)


@dataclass
class RolloutState:
    """Shared by all rollouts of a run.

    `http` is a client of the session server, open while the run lasts. `aborted` turns true when the run is
    interrupted: a generate function that loops on its own looks at it.
    """

    args: RolloutArgs
    agent: BoundPlugin | None = None
    sampling_params: dict[str, Any] = field(default_factory=dict)
    http: aiohttp.ClientSession | None = None
    processor: Any = None
    aborted: bool = False
    generate_fn_semaphore: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(64))

    @cached_property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer, loaded with transformers on first use."""
        if not self.args.hf_checkpoint:
            raise ConfigError("this generate function needs a tokenizer: give --checkpoint")
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ConfigError(
                "this generate function needs transformers: pip install 'miles-plugins[local]'"
            ) from error
        return AutoTokenizer.from_pretrained(self.args.hf_checkpoint)
