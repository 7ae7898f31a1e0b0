"""Checks of sample hooks: picking is pure selection."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from miles_core.plugins import Plugin
from miles_core.rollout.state import RolloutArgs
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


def trains_only_what_was_sampled(plugin: Plugin) -> str | Skip | None:
    """Where the mask is 1, token and log-probability are the engine's; anything else would be 422."""
    if not plugin.has("postprocess_samples"):
        return Skip("has no postprocess_samples")
    sampled = {(at, token, p) for leaf in leaves() for at, token, p in _trained(leaf)}
    for sample in plugin.call("postprocess_samples", leaves(), _session()):
        made_up = [entry for entry in _trained(sample) if entry not in sampled]
        if made_up:
            at, token, p = made_up[0]
            return f"trains token {token} at position {at} with log-probability {p}, which the engine did not sample"
    return None


def decides_on_groups(plugin: Plugin) -> str | Skip | None:
    """`keep_group` says True or False, or gives an object with `keep`, whatever the rewards are; it changes nothing."""
    if not plugin.has("keep_group"):
        return Skip("has no keep_group")
    for rewards in ((0.0, 1.0), (1.0, 1.0), (None, None)):
        group = leaves()
        for sample, reward in zip(group, rewards, strict=True):
            sample.reward = reward
        before = [copy.deepcopy(sample.to_dict()) for sample in group]
        answer = plugin.call("keep_group", RolloutArgs(), list(group))
        if not isinstance(getattr(answer, "keep", answer), bool):
            return f"keep_group returned {answer!r} for the rewards {rewards}; return True or False"
        if [sample.to_dict() for sample in group] != before:
            return "keep_group changed a sample"
    return None


def _trained(sample: Sample) -> list[tuple[int, int, float]]:
    """Position, token and log-probability of what a sample trains."""
    start = len(sample.tokens) - sample.response_length
    mask, log_probs = sample.loss_mask or [], sample.rollout_log_probs or []
    entries = enumerate(zip(sample.tokens[start:], mask, log_probs, strict=True), start)
    return [(at, token, p) for at, (token, on, p) in entries if on]


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
    "trains only what was sampled": trains_only_what_was_sampled,
    "decides on groups": decides_on_groups,
}
OPTIONAL = frozenset(CHECKS)
"""A plugin has one of the hooks at least, which loading has checked."""
