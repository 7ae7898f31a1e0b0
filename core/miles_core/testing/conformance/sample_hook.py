"""Checks of sample hooks: picking is pure selection."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from miles_core.plugins import Plugin
from miles_core.testing.conformance.report import CheckFunction, Skip
from miles_core.types import Sample

_SESSION: dict[str, Any] = {
    "max_trim_tokens": 0,
    "tito_session_mismatch": [],
    "accumulated_token_ids": [1, 2, 3],
}


def leaves() -> list[Sample]:
    """Two leaves that share their first generation: node 0 has the children 1 and 2."""
    return [_leaf(1, [0, 1]), _leaf(2, [0, 2])]


def _leaf(node: int, path: list[int]) -> Sample:
    return Sample(
        tokens=[1, 2, 3, 4, 5 + node],
        response="abc",
        response_length=3,
        loss_mask=[1, 0, 1],
        rollout_log_probs=[-0.1, 0.0, -0.2],
        status=Sample.Status.COMPLETED,
        metadata={"leaf": {"node_id": node, "parent": 0, "path_node_ids": path, "response_id": f"r{node}"}},
    )


def picks_a_subset(plugin: Plugin) -> str | Skip | None:
    """What is picked is some of what was given, each once, nothing rewritten."""
    if not plugin.has("pick_samples"):
        return Skip("has no pick_samples")
    given = leaves()
    before = [copy.deepcopy(sample.to_dict()) for sample in given]
    picked = plugin.call("pick_samples", list(given), _session())
    if not isinstance(picked, list):
        return f"pick_samples returned {type(picked).__name__}; return a list of the samples given"
    if any(all(sample is not one for one in given) for sample in picked):
        return "pick_samples returned a sample that it was not given"
    if len({id(sample) for sample in picked}) < len(picked):
        return "pick_samples returned a sample twice"
    if [sample.to_dict() for sample in given] != before:
        return "pick_samples changed a sample; do that in postprocess_samples"
    return None


def postprocesses_to_valid_samples(plugin: Plugin) -> str | Skip | None:
    """What comes out is a list of samples whose per-token fields agree."""
    if not plugin.has("postprocess_samples"):
        return Skip("has no postprocess_samples")
    finished = plugin.call("postprocess_samples", leaves(), _session())
    if not isinstance(finished, list) or not all(isinstance(sample, Sample) for sample in finished):
        return "postprocess_samples does not return a list of samples"
    for sample in finished:
        sample.validate()
    return None


def _session() -> dict[str, Any]:
    nodes: list[dict[str, Any]] = [
        {"id": 0, "parent": None, "seq": 1, "truncated": False, "completion_span": [2, 3], "num_tokens": 3},
        {"id": 1, "parent": 0, "seq": 2, "truncated": False, "completion_span": [4, 5], "num_tokens": 5},
        {"id": 2, "parent": 0, "seq": 3, "truncated": False, "completion_span": [4, 5], "num_tokens": 5},
    ]
    for node in nodes:
        node.update(committed_at=0.0, response_id=f"r{node['id']}")
    tree = {"nodes": nodes, "leaves": [{"node_id": n, "path_node_ids": [0, n]} for n in (1, 2)]}
    return {**copy.deepcopy(_SESSION), "tree": tree}


CHECKS: Mapping[str, CheckFunction] = {
    "picks a subset": picks_a_subset,
    "postprocesses to valid samples": postprocesses_to_valid_samples,
}
