"""The samples of a tree: one per leaf, then picked, then finished by hooks that are held to their contract."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from miles_core.errors import InvariantError, MilesError, PluginError, SampleError, WireError
from miles_core.session import wire
from miles_core.session.assemble import AssembledSample, assemble_path
from miles_core.session.routing import Replay
from miles_core.session.tree import Forest, Node
from miles_core.session.turn import Session
from miles_core.tito import BoundFamily
from miles_core.types import PrefixCacheInfo, Sample, SampleStatus, SpecInfo

TOKEN_FIELDS = ("tokens", "loss_mask", "rollout_log_probs")
"""What every sample has, one entry for each token of the whole or of the response."""


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
    given: dict[int, _Leaf] = {}
    for leaf in session.forest.leaves():
        assembled = assemble_path(session, leaf.path(), family, max_seq_len=max_seq_len, replay=replay)
        if assembled is not None:
            sample = _as_sample(assembled, leaf)
            given[id(sample)] = _Leaf(sample, _copied(sample), assembled)
    shown = _with_lists(session_metadata, list(given.values()))
    picked = _pick(pick, list(given.values()), shown)
    finished = _call(postprocess, list(picked), shown)
    if not isinstance(finished, list) or not all(isinstance(sample, Sample) for sample in finished):
        raise SampleError(f"{postprocess.name} returned {_described(finished)}, expected a list of Sample")
    out = [_checked(postprocess, sample, given) for sample in finished]
    _let_go(finished, picked)
    while given:
        given.popitem()
    return out


@dataclass(frozen=True, slots=True)
class _Leaf:
    """The sample of a leaf as hooks finish it, a copy to choose by, and what both were made of."""

    sample: Sample
    copy: Sample
    assembled: AssembledSample


def _let_go(*lists: list[Sample]) -> None:
    """Empty lists of samples one by one: what goes at once, millions of ids, stops every thread for as long."""
    for samples in lists:
        while samples:
            samples.pop()


def _described(value: Any) -> str:
    if not isinstance(value, list):
        return type(value).__name__
    return f"a list that holds {next(type(item).__name__ for item in value if not isinstance(item, Sample))}"


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
        found = hook.call(samples, _own(metadata))
    except PluginError as error:
        raise SampleError(error.message) from error
    except MilesError as error:  # an error of ours that the hook raised is its fault all the same
        raise SampleError(f"{hook.name} failed: {type(error).__name__}: {error.message}") from error
    if inspect.iscoroutine(found):
        found.close()
    return found


def _with_lists(metadata: Mapping[str, Any], leaves: list[_Leaf]) -> dict[str, Any]:
    """A session's metadata with ids as lists; those of a leaf are its sample's numbers, which are made once."""
    return {
        key: _Ids(_listed(value, leaves)) if isinstance(value, np.ndarray) else value for key, value in metadata.items()
    }


class _Ids(list[int]):
    """Ids, of which a copy is a list of the same numbers."""


def _listed(ids: np.ndarray[Any, Any], leaves: list[_Leaf]) -> list[int]:
    same = (leaf.sample.tokens for leaf in leaves if np.array_equal(leaf.assembled.tokens, ids))
    known = next(same, None)
    return ids.tolist() if known is None else list(known)


def _own(value: Any) -> Any:
    """A copy of a JSON value, as `copy.deepcopy` makes it in several times the time."""
    if isinstance(value, _Ids):
        return list(value)
    if isinstance(value, dict):
        return {key: _own(inner) if isinstance(inner, (dict, list)) else inner for key, inner in value.items()}
    if isinstance(value, list):
        return [_own(inner) if isinstance(inner, (dict, list)) else inner for inner in value]
    return value


def _pick(hook: SampleHook, leaves: list[_Leaf], metadata: Mapping[str, Any]) -> list[Sample]:
    """The picked samples; the hook sees copies, so that what it changes is found and has no effect."""
    originals = {id(leaf.copy): leaf.sample for leaf in leaves}
    picked = _call(hook, [leaf.copy for leaf in leaves], metadata)
    if not isinstance(picked, list):
        raise SampleError(f"{hook.name} returned {type(picked).__name__}, expected a list of the samples it was given")
    strangers = [index for index, sample in enumerate(picked) if id(sample) not in originals]
    if strangers:
        raise SampleError(f"{hook.name} returned samples at {strangers} that it was not given; it may only choose")
    if len({id(sample) for sample in picked}) != len(picked):
        raise SampleError(f"{hook.name} returned a sample twice; it may only choose")
    if not all(_same(leaf.copy, leaf.sample) for leaf in leaves):
        raise SampleError(f"{hook.name} changed a sample; it may only choose")
    return [originals[id(sample)] for sample in picked]


def _copied(sample: Sample) -> Sample:
    """A copy to look at: long fields in one go, arrays as views that cannot be written to."""
    out = copy.copy(sample)
    for each in fields(Sample):
        value = getattr(sample, each.name)
        if isinstance(value, np.ndarray):
            value = value.view()
            value.flags.writeable = False
            setattr(out, each.name, value)
        elif each.name in TOKEN_FIELDS and value:
            setattr(out, each.name, list(value))
        elif isinstance(value, (dict, list)):
            setattr(out, each.name, _own(value))
        elif value is not None and not isinstance(value, (str, int, float)):
            setattr(out, each.name, copy.deepcopy(value))
    return out


def _same(left: Sample, right: Sample) -> bool:
    """Whether two samples agree in every field; rows of experts are arrays, which `==` does not compare to a bool."""
    pairs = [(getattr(left, field.name), getattr(right, field.name)) for field in fields(Sample)]
    return all(
        isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and np.array_equal(a, b)
        if isinstance(a, np.ndarray) or isinstance(b, np.ndarray)
        else a == b
        for a, b in pairs
    )


def _checked(hook: SampleHook, sample: Sample, given: Mapping[int, _Leaf]) -> AssembledSample:
    """A finished sample, ready for the wire; `given` has the leaves' own ones by identity."""
    missing = [name for name in TOKEN_FIELDS if getattr(sample, name) is None]
    if missing:
        raise SampleError(f"{hook.name} returned a sample without {' and '.join(missing)}")
    own = given.get(id(sample))
    try:
        sample.validate()
        out = _to_wire(sample, own)
        out.check()
        wire.check_row(out)
    except (AttributeError, TypeError, ValueError, WireError, InvariantError) as error:
        raise SampleError(f"{hook.name} returned a sample that does not hold together: {error}") from error
    if own is None or _made_up(out, own.assembled) is not None:
        found = [_made_up(out, leaf.assembled) for leaf in given.values()]
        if None not in found:
            at = max(position for position in found if position is not None) if found else 0
            raise SampleError(
                f"{hook.name} returned a sample that trains token {at}, which the engine did not sample there with "
                "that log-probability; a mask may be cleared, and not set"
            )
    return out


def _made_up(sample: AssembledSample, known: AssembledSample) -> int | None:
    """The first position that is trained on and was not sampled there in `known`, if there is any."""
    start, front = len(sample.tokens) - sample.response_length, len(known.tokens) - known.response_length
    at = np.flatnonzero(sample.loss_mask) + start
    inside = at[(at >= front) & (at < len(known.tokens))]
    same = (
        (known.loss_mask[inside - front] == 1)
        & (known.tokens[inside] == sample.tokens[inside])
        & (known.rollout_log_probs[inside - front] == sample.rollout_log_probs[inside - start])
    )
    if len(inside) == len(at) and same.all():
        return None
    return int(np.setdiff1d(at, inside[same])[0])


def _to_wire(sample: Sample, own: _Leaf | None) -> AssembledSample:
    return AssembledSample(
        **{name: _tensor(name, sample, own) for name in wire.TENSORS},
        response=sample.response,
        response_length=sample.response_length,
        status=SampleStatus(sample.status).value,
        weight_versions=list(sample.weight_versions),
        prefix_cache_info=dict(sample.prefix_cache_info.__dict__),
        spec_info=dict(sample.spec_info.__dict__),
        metadata=sample.metadata,
        reward=sample.reward,
        has_reward=True,
    )


def _tensor(name: str, sample: Sample, own: _Leaf | None) -> Any:
    """A field as an array: the one it was made of, where its list says the same."""
    value = getattr(sample, name)
    if own is not None and type(value) is list and value == getattr(own.copy, name):
        return getattr(own.assembled, name)
    return wire.fitted(name, value, wire.TENSORS[name])
