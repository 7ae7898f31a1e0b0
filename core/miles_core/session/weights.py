"""Which weights sampled which token, where they were updated while sessions run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles_core.session.tree import Node


def weight_versions(meta: Mapping[str, Any], count: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The versions of the weights that sampled a turn's `count` tokens, in order, and where the tokens of each end.

    One version (an empty name where the engine gives none), or several where an update fell inside the generation. The
    ends are empty where several sampled and the engine does not say which what.
    """
    versions: list[str] = []
    ends: list[int | None] = []
    spans = meta.get("weight_versions")
    for span in spans if isinstance(spans, list) else ():
        if not isinstance(span, dict) or span.get("version") is None or _empty(span):
            continue
        name, end = str(span["version"]), _position(span.get("end"))
        if versions and versions[-1] == name:
            ends[-1] = end
        else:
            versions.append(name)
            ends.append(end)
    if len(versions) < 2:
        version = versions[0] if versions else meta.get("weight_version")
        return ("" if version is None else str(version),), (count,)
    known = [end for end in ends if end is not None]
    sound = len(known) == len(ends) and known == sorted(set(known)) and known[-1] == count
    return tuple(versions), tuple(known) if sound else ()


def _empty(span: Mapping[str, Any]) -> bool:
    """Whether a span of weights sampled nothing; one that does not say where it begins and ends may have."""
    return span.get("start") is not None and span.get("start") == span.get("end")


def _position(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def weight_spans(path: Sequence[Node], used: Sequence[Node], length: int) -> list[dict[str, Any]]:
    """The sampled tokens of a sample of `length` tokens by the weights that sampled them, in order.

    Each span is `{turn, version, start, end}`, positions in the sample's tokens. `version` is null for a turn during
    which weights were updated and of which it is not known where.
    """
    rows: list[dict[str, Any]] = []
    for turn, node in enumerate(used):
        following = path[turn + 1] if turn + 1 < len(path) else None
        stop = min(length, node.num_tokens if following is None else min(node.num_tokens, following.kept))
        start = node.prompt_length
        for version, end in _spans(node):
            end = min(end, stop)
            if start < end:
                rows.append({"turn": turn, "version": version, "start": start, "end": end})
                start = end
    return rows


def _spans(node: Node) -> list[tuple[str | None, int]]:
    facts = node.facts
    if not facts.version_ends:
        return [(None, node.num_tokens)]
    ends = (node.prompt_length + end for end in facts.version_ends)
    return list(zip(facts.weight_versions, ends, strict=True))
