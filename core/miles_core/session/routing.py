"""Routing replay: which rows of routed experts and indexer choices a turn asks for, and how turns' rows join."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from miles_core.errors import SampleError
from miles_core.session.answer import RowText
from miles_core.session.tree import Node

Rows = np.ndarray[Any, np.dtype[np.int32]]
"""int32 `[rows, layers, topk]`; row `i` belongs to token `i + 1`."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What is recorded for replay. `layers` is the model's layer count, which shapes the experts' rows.

    With `incremental`, a turn asks only for rows that its history does not hold yet.
    """

    experts: bool = False
    indexer: bool = False
    incremental: bool = False
    layers: int = 0


def request_fields(replay: Replay, base: Node | None, kept: int) -> dict[str, Any]:
    """The fields that a turn's request carries; `kept` ids of `base`'s checkpoint stay in its prompt."""
    fields: dict[str, Any] = {}
    if replay.experts:
        fields["return_routed_experts"] = True
        if replay.incremental:
            fields["routed_experts_start_len"] = min(base.num_tokens - 1, kept) if base else 0
    if replay.indexer:
        fields["return_indexer_topk"] = True
    return fields


def usable_turns(used: Sequence[Node], replay: Replay) -> int:
    """How many turns of a sample may stay: those before the first that lacks rows which earlier turns had.

    Raises SampleError for such a gap when rows come incrementally: what follows could not be joined.
    """
    wanted = [key for key, on in (("routed_experts", replay.experts), ("indexer_topk", replay.indexer)) if on]
    if not wanted:
        return len(used)
    seen = False
    for number, node in enumerate(used):
        there = all(key in node.answer.rows for key in wanted)
        if replay.incremental and not there:
            raise SampleError(f"turn {number} has no routing rows, and the turns after it hold only later ones")
        if seen and not there:
            return number
        seen = seen or there
    return len(used)


def join_rows(used: Sequence[Node], replay: Replay, length: int) -> tuple[Rows | None, Rows | None]:
    """Experts' and indexer's rows of a sample of `length` tokens: `length - 1` each, or None.

    Raises SampleError (422) with the numbers where a turn's rows do not fit.
    """
    experts = _joined("routed_experts", used, replay, length) if replay.experts else None
    indexer = _joined("indexer_topk", used, replay, length) if replay.indexer else None
    return experts, indexer


@dataclass(frozen=True)
class _Part:
    """The rows that one turn brought: those from `start` on."""

    where: str
    text: RowText
    start: int
    shape: tuple[int, int, int]


def _joined(key: str, used: Sequence[Node], replay: Replay, length: int) -> Rows | None:
    """Each token's row from the last turn that brought it: a whole answer's rows stand for all before it."""
    parts: list[_Part] = []
    for number, node in enumerate(used):
        if key in node.answer.rows:
            parts.append(_part(f"turn {number}: {key}", key, node, replay, parts[-1] if parts else None))
    if not parts:
        return None
    end, needed = length - 1, []
    for part in reversed(parts):
        if end > part.start:
            needed.append(_decoded(part)[: end - part.start])
        end = min(end, part.start)
    return np.concatenate(needed[::-1]) if needed else np.zeros((0, *parts[-1].shape[1:]), dtype=np.int32)


def _part(where: str, key: str, node: Node, replay: Replay, before: _Part | None) -> _Part:
    """A turn's rows, their count checked against its tokens and the turn before."""
    text, have = node.answer.rows[key], before.start + before.shape[0] if before else 0
    layers = replay.layers if key == "routed_experts" else node.answer.indexer_layers
    if text is None or not isinstance(layers, int) or isinstance(layers, bool) or layers < 1:
        raise SampleError(f"{where} cannot be read: base64 text and a layer count are needed, found {layers!r} layers")
    start = _start(key, text, node, layers, before)
    if start > have:
        raise SampleError(f"{where} begins at row {start}, and the turns before it end at row {have}")
    count, values = node.num_tokens - 1 - start, text.size // 4
    if count == 0 and values == 0 and before is not None:
        return _Part(where, text, start, (0, *before.shape[1:]))
    if count < 1 or values == 0 or text.size % 4 or values % (count * layers):
        raise SampleError(f"{where} has {values} values, which do not make {count} rows of {layers} layers")
    shape = (count, layers, values // (count * layers))
    if before is not None and before.shape[1:] != shape[1:]:
        raise SampleError(f"{where} has layers and topk {shape[1:]}, earlier turns {before.shape[1:]}")
    return _Part(where, text, start, shape)


def _start(key: str, text: RowText, node: Node, layers: int, before: _Part | None) -> int:
    """The row that a turn's rows begin at.

    For experts it is what the request asked for. Nothing in a request says whether the indexer's rows are cut alike,
    so their number tells: as many as all tokens need, or as the experts' start leaves.
    """
    asked = int(node.request.get("routed_experts_start_len") or 0)
    if key == "routed_experts" or before is None:
        return asked if key == "routed_experts" else 0
    rows = text.size // 4 // (layers * before.shape[2])
    return asked if rows == node.num_tokens - 1 - asked else 0


def _decoded(part: _Part) -> Rows:
    try:
        values = np.frombuffer(base64.b64decode(b"".join(part.text.pieces()), validate=True), dtype="<i4")
    except (binascii.Error, ValueError) as error:
        raise SampleError(f"{part.where} is not base64 of int32 values: {error}") from error
    try:
        return values.astype(np.int32).reshape(part.shape)
    except ValueError as error:
        raise SampleError(f"{part.where} is not base64 of {part.shape} values: {error}") from error
