"""The samples of a tree: one per leaf, then picked, then finished by hooks that are held to their contract."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from miles_core.errors import PluginError, SampleError
from miles_core.session.assemble import AssembledSample, assemble_path
from miles_core.session.routing import Replay
from miles_core.session.tree import Forest, Node
from miles_core.session.turn import Session
from miles_core.tito import BoundFamily
from miles_core.types import PrefixCacheInfo, Sample, SampleStatus, SpecInfo


@dataclass(frozen=True)
class SampleHook:
    """A bound sample hook, and how messages call it."""

    name: str
    call: Callable[[list[Sample], dict[str, Any]], Any]


def tree_metadata(forest: Forest) -> dict[str, Any]:
    """`metadata.tree`: every generation with its place and span, and the leaves with their paths."""
    return {
        "nodes": [
            {
                "id": node.id,
                "parent": node.parent.id if node.parent else None,
                "seq": node.seq,
                "truncated": node.truncated,
                "committed_at": node.facts.timestamp,
                "completion_span": [node.prompt_length, node.num_tokens],
                "num_tokens": node.num_tokens,
                "response_id": node.facts.response_id,
            }
            for node in forest.nodes
        ],
        "leaves": [{"node_id": leaf.id, "path_node_ids": _ids(leaf)} for leaf in forest.leaves()],
    }


def _ids(node: Node) -> list[int]:
    return [step.id for step in node.path()]


def leaf_samples(
    session: Session,
    family: BoundFamily,
    session_metadata: dict[str, Any],
    pick: SampleHook,
    postprocess: SampleHook,
    *,
    max_seq_len: int | None,
    replay: Replay | None = None,
) -> list[AssembledSample]:
    """One sample per leaf, picked and finished. Raises SampleError (422) naming the hook that broke its contract."""
    samples = []
    for leaf in session.forest.leaves():
        assembled = assemble_path(session, leaf.path(), family, max_seq_len=max_seq_len, replay=replay)
        if assembled is not None:
            samples.append(_as_sample(assembled, leaf))
    picked = _pick(pick, samples, session_metadata)
    finished = _call(postprocess, picked, session_metadata)
    if not isinstance(finished, list) or not all(isinstance(sample, Sample) for sample in finished):
        raise SampleError(f"{postprocess.name} returned {type(finished).__name__}, expected a list of Sample")
    return [_checked(postprocess, sample) for sample in finished]


def _as_sample(assembled: AssembledSample, leaf: Node) -> Sample:
    place = {
        "node_id": leaf.id,
        "parent": leaf.parent.id if leaf.parent else None,
        "path_node_ids": _ids(leaf),
        "response_id": leaf.facts.response_id,
    }
    return Sample(
        tokens=assembled.tokens.tolist(),
        loss_mask=assembled.loss_mask.tolist(),
        rollout_log_probs=assembled.rollout_log_probs.tolist(),
        response=assembled.response,
        response_length=assembled.response_length,
        status=SampleStatus(assembled.status),
        weight_versions=assembled.weight_versions,
        prefix_cache_info=PrefixCacheInfo(**assembled.prefix_cache_info),
        spec_info=SpecInfo(**assembled.spec_info),
        metadata={**assembled.metadata, "leaf": place},
        rollout_routed_experts=assembled.rollout_routed_experts,
        rollout_indexer_topk=assembled.rollout_indexer_topk,
    )


def _call(hook: SampleHook, samples: list[Sample], metadata: Mapping[str, Any]) -> Any:
    try:
        return hook.call(samples, copy.deepcopy(dict(metadata)))
    except PluginError as error:
        raise SampleError(error.message) from error


def _pick(hook: SampleHook, samples: list[Sample], metadata: Mapping[str, Any]) -> list[Sample]:
    """The picked samples; the hook sees copies, so that what it changes is found and has no effect."""
    shown = copy.deepcopy(samples)
    originals = {id(copied): sample for copied, sample in zip(shown, samples, strict=True)}
    picked = _call(hook, list(shown), metadata)
    if not isinstance(picked, list):
        raise SampleError(f"{hook.name} returned {type(picked).__name__}, expected a list of the samples it was given")
    strangers = [index for index, sample in enumerate(picked) if id(sample) not in originals]
    if strangers:
        raise SampleError(f"{hook.name} returned samples at {strangers} that it was not given; it may only choose")
    if len({id(sample) for sample in picked}) != len(picked):
        raise SampleError(f"{hook.name} returned a sample twice; it may only choose")
    if not all(map(_same, shown, samples)):
        raise SampleError(f"{hook.name} changed a sample; it may only choose")
    return [originals[id(sample)] for sample in picked]


def _same(left: Sample, right: Sample) -> bool:
    """Whether two samples agree in every field; rows of experts are arrays, which `==` does not compare to a bool."""
    pairs = [(getattr(left, field.name), getattr(right, field.name)) for field in fields(Sample)]
    return all(
        isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and np.array_equal(a, b)
        if isinstance(a, np.ndarray) or isinstance(b, np.ndarray)
        else a == b
        for a, b in pairs
    )


def _checked(hook: SampleHook, sample: Sample) -> AssembledSample:
    """A finished sample, ready for the wire."""
    if sample.loss_mask is None or sample.rollout_log_probs is None:
        raise SampleError(f"{hook.name} returned a sample without loss_mask or rollout_log_probs")
    try:
        sample.validate()
        return _to_wire(sample)
    except (TypeError, ValueError) as error:
        raise SampleError(f"{hook.name} returned a sample that does not hold together: {error}") from error


def _to_wire(sample: Sample) -> AssembledSample:
    mask: Sequence[int] = sample.loss_mask or ()
    if not set(mask) <= {0, 1}:
        raise ValueError("loss_mask has values other than 0 and 1")
    return AssembledSample(
        tokens=np.array(sample.tokens, dtype=np.int64),
        loss_mask=np.array(mask, dtype=np.uint8),
        rollout_log_probs=np.array(sample.rollout_log_probs, dtype=np.float64),
        response=sample.response,
        response_length=sample.response_length,
        status=SampleStatus(sample.status).value,
        weight_versions=list(sample.weight_versions),
        prefix_cache_info=dict(sample.prefix_cache_info.__dict__),
        spec_info=dict(sample.spec_info.__dict__),
        metadata=sample.metadata,
        rollout_routed_experts=sample.rollout_routed_experts,
        rollout_indexer_topk=sample.rollout_indexer_topk,
        reward=sample.reward,
        has_reward=True,
    )
