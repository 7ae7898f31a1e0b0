"""Sample hooks that keep or break their contract, named by dotted path in tests."""

from __future__ import annotations

import copy
from typing import Any

from miles_core.types import Sample

Samples = list[Sample]


def pick_all(leaf_samples: Samples, session_metadata: dict[str, Any]) -> Samples:
    return leaf_samples


def pick_copy(leaf_samples: Samples, session_metadata: dict[str, Any]) -> Samples:
    return [copy.copy(sample) for sample in leaf_samples]


def pick_twice(leaf_samples: Samples, session_metadata: dict[str, Any]) -> Samples:
    return [*leaf_samples, *leaf_samples]


def pick_and_write(leaf_samples: Samples, session_metadata: dict[str, Any]) -> Samples:
    leaf_samples[0].metadata["mine"] = 1
    return leaf_samples


def pick_nothing_and_raise(leaf_samples: Samples, session_metadata: dict[str, Any]) -> Samples:
    raise ValueError("no taste")


def shorten(leaf_samples: Samples, session_metadata: dict[str, Any]) -> Samples:
    leaf_samples[0].loss_mask = [1]
    return leaf_samples
