"""Keep a group only if its rewards differ: with equal ones, a group-relative advantage is zero everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miles_core import hookimpl
from miles_core.types import Sample

SMALLEST = 1e-6
"""Rewards nearer than this are equal."""


@hookimpl
def keep_group(args: Any, samples: Sequence[Sample]) -> bool:
    """Whether the rewards (`--reward-key` of each, where it is set) are not all the same; none counts as 0."""
    values = [float(sample.get_reward_value(args) or 0.0) for sample in samples]
    return bool(values) and max(values) - min(values) > SMALLEST
