"""Rewards by a function of the user's: for each sample, or for all samples of a prompt at once."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from miles_core.errors import ConfigError, PluginContractError
from miles_core.types import Sample

FORMS = {
    False: "write reward(sample) or reward(args, sample)",
    True: "write reward(samples) or reward(args, samples), with a reward for each sample",
}


@dataclass(frozen=True)
class Reward:
    """A reward function: async, or plain and then run in a thread. `per_group` says that it takes a group's samples."""

    function: Callable[..., Any]
    per_group: bool = False
    takes_args: bool = True

    @classmethod
    def of(cls, function: Callable[..., Any], *, per_group: bool = False) -> Reward:
        """From its signature. Raises ConfigError for one that takes neither one nor two arguments."""
        parameters = list(inspect.signature(function).parameters.values())
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        required = [each for each in parameters if each.kind in kinds and each.default is each.empty]
        if len(required) not in (1, 2):
            name = getattr(function, "__qualname__", type(function).__qualname__)
            raise ConfigError(f"the reward function {name} takes {len(required)} arguments; {FORMS[per_group]}")
        return cls(function, per_group, len(required) == 2)

    @classmethod
    def load(cls, path: str, *, per_group: bool = False) -> Reward:
        """The function that a dotted path names."""
        module, _, name = path.rpartition(".")
        try:
            found: Any = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"--reward-function {path}: {error}; give package.module.function") from error
        if not callable(found):
            raise ConfigError(f"--reward-function {path}: not a function; give package.module.function")
        function: Any = found() if inspect.isclass(found) else found
        return cls.of(function, per_group=per_group)

    async def score(self, args: Any, sample: Sample) -> None:
        """Set one sample's reward. What the function raises is the rollout's failure."""
        sample.reward = checked(await self._call(args, sample))

    async def score_group(self, args: Any, samples: Sequence[Sample]) -> None:
        """Set the rewards of a group, in the order of its samples."""
        values = await self._call(args, list(samples))
        values = values.tolist() if hasattr(values, "tolist") else values
        if not isinstance(values, (list, tuple)) or len(values) != len(samples):
            found = f"{len(values)} rewards" if isinstance(values, (list, tuple)) else type(values).__name__
            raise PluginContractError(f"the reward function returned {found} for a group of {len(samples)} samples")
        for sample, value in zip(samples, map(checked, values), strict=True):
            sample.reward = value

    async def _call(self, args: Any, given: Any) -> Any:
        arguments = (args, given) if self.takes_args else (given,)
        if inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(type(self.function).__call__):
            return await self.function(*arguments)
        result = await asyncio.to_thread(self.function, *arguments)
        return await result if inspect.isawaitable(result) else result


def checked(reward: Any) -> float | dict[str, Any] | None:
    """A reward as samples have it: a finite number, an object of such, or None. Raises TypeError or ValueError."""
    if isinstance(reward, dict):
        return {key: checked(value) for key, value in reward.items()}
    value = reward.item() if hasattr(reward, "item") else reward
    if value is None:
        return None
    if not isinstance(value, (int, float)):
        kind = type(value).__name__
        raise TypeError(f"the reward {value!r} is a {kind}; expected a number, or an object of numbers")
    if not math.isfinite(value):
        raise ValueError(f"the reward {value!r} is not finite")
    return float(value)
