"""Train each generation once, and lay what the agent returned over the samples."""

from __future__ import annotations

from typing import Any

from miles_core import hookimpl
from miles_core.types import Sample

OWN_KEYS = ("accumulated_token_ids", "tito_session_mismatch", "leaf")
"""Metadata of the server that an agent cannot replace."""


@hookimpl
def postprocess_samples(leaf_samples: list[Sample], session_metadata: dict[str, Any]) -> list[Sample]:
    """Mask a shared generation in all kept leaves but the one with the lowest `node_id`; merge the agent's metadata.

    `reward` in the agent's metadata becomes each sample's reward.
    """
    spans = {node["id"]: node["completion_span"] for node in session_metadata["tree"]["nodes"]}
    trained: dict[int, int] = {}  # generation -> position up to which some sample trains it
    for sample in sorted(leaf_samples, key=lambda s: int(s.metadata["leaf"]["node_id"])):
        path = sample.metadata["leaf"]["path_node_ids"]
        for node_id in path:
            start, end = spans[node_id]
            _mask(sample, start, trained.get(node_id, start))
            trained[node_id] = max(trained.get(node_id, start), min(end, len(sample.tokens)))
    agent = session_metadata.get("agent") or {}
    for sample in leaf_samples:
        sample.metadata = {**sample.metadata, **{k: v for k, v in agent.items() if k not in OWN_KEYS}}
        if agent.get("reward") is not None:
            sample.reward = agent["reward"]
    return leaf_samples


def _mask(sample: Sample, start: int, end: int) -> None:
    """Untrain the positions `start … end - 1` of the whole sequence."""
    mask = sample.loss_mask or []
    offset = len(sample.tokens) - sample.response_length
    for position in range(max(start - offset, 0), min(end - offset, len(mask))):
        mask[position] = 0
