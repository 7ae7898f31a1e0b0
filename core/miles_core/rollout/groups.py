"""Groups: the rollouts of one prompt, which are rewarded, kept or left out together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from miles_core.errors import PluginContractError
from miles_core.types import Sample

if TYPE_CHECKING:
    from miles_core.rollout.job import Job

KeepGroup: TypeAlias = Callable[[Any, Sequence[Sample]], Any]
"""A filter: `(args, samples)`, one sample of each rollout, to a bool, or to an object with `keep` and `reason`."""


@dataclass
class Group:
    """One prompt's rollouts: those that are due, and what they gave; `settled` once nothing is due any more."""

    size: int
    due: int
    finished: list[tuple[Job, list[Sample], float]] = field(default_factory=list)
    """Each rollout with its samples and when it started."""
    admitted: bool = False
    held: bool = False
    """Whether one of them was aborted, and a later run goes on with it."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def settled(self) -> bool:
        """Whether every rollout is over."""
        return self.due == 0

    @property
    def samples(self) -> list[Sample]:
        """One sample of each finished rollout, however many leaves it has, in the order of the rollouts."""
        return [samples[0] for _, samples, _ in sorted(self.finished, key=lambda entry: entry[0].sample_index)]


def decide(keep: KeepGroup, args: Any, samples: Sequence[Sample]) -> tuple[bool, str]:
    """Whether the filter keeps a group, and why not. Raises PluginContractError for another answer."""
    answer = keep(args, list(samples))
    reason = getattr(answer, "reason", None)
    kept = getattr(answer, "keep", answer)
    if not isinstance(kept, bool):
        raise PluginContractError(f"the group filter returned {answer!r}; expected True, False, or an object with keep")
    return kept, str(reason or "the filter left it out")
