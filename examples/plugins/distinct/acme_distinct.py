"""A sample hook for tree histories: of branches that say the same, one becomes a sample."""

from __future__ import annotations

from typing import Any

from miles_core import Sample


def pick_samples(leaf_samples: list[Sample], session_metadata: dict[str, Any]) -> list[Sample]:
    """The first leaf of each response."""
    first: dict[tuple[int, ...], Sample] = {}
    for sample in sorted(leaf_samples, key=lambda sample: int(sample.metadata["leaf"]["node_id"])):
        first.setdefault(tuple(sample.tokens), sample)
    return list(first.values())
