"""What whole rollout functions of miles take and give; field names are miles'."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from miles_core.types import Sample


@dataclass(frozen=True)
class RolloutFnConstructorInput:
    """What a rollout function that is a class is made with."""

    args: Any
    data_source: Any


@dataclass(frozen=True)
class RolloutFnTrainInput:
    """One training step's rollout: its number, and the weights that it is sampled with."""

    rollout_id: int
    weight_version: Any = None

    @property
    def evaluation(self) -> bool:
        """Training, not evaluation."""
        return False


@dataclass(frozen=True)
class RolloutFnEvalInput:
    """The same for an evaluation."""

    rollout_id: int
    weight_version: Any = None

    @property
    def evaluation(self) -> bool:
        """Evaluation."""
        return True


@dataclass
class RolloutFnTrainOutput:
    """Groups of samples, and what was measured on the way."""

    samples: list[list[Sample]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """Results by data set, and what was measured on the way."""

    data: dict[str, dict[str, Any]] = field(default_factory=dict)
    metrics: dict[str, Any] | None = None
