"""Routing replay: which rows of routed experts and indexer choices a turn asks for, and how turns' rows join."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from miles_core.errors import SampleError
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


Meta = dict[str, Any]
"""The `meta_info` of a turn's answer."""


def recorded_metas(path: Sequence[Node], replay: Replay) -> list[Meta]:
    """The `meta_info` of the turns up to the first that lacks rows which earlier turns had.

    Empty objects where nothing is recorded for replay: the answers are not read then. Raises SampleError for such a
    gap when rows come incrementally: what follows could not be joined.
    """
    wanted = [key for key, on in (("routed_experts", replay.experts), ("indexer_topk", replay.indexer)) if on]
    if not wanted:
        return [{} for _ in path]
    metas: list[Meta] = []
    seen = False
    for number, node in enumerate(path):
        meta = orjson.loads(node.reply)["choices"][0].get("meta_info") or {}
        there = all(meta.get(key) is not None for key in wanted)
        if replay.incremental and not there:
            raise SampleError(f"turn {number} has no routing rows, and the turns after it hold only later ones")
        if seen and not there:
            break
        seen = seen or there
        metas.append(meta)
    return metas


def join_rows(
    used: Sequence[Node], metas: Sequence[Meta], replay: Replay, length: int
) -> tuple[Rows | None, Rows | None]:
    """Experts' and indexer's rows of a sample of `length` tokens: `length - 1` each, or None.

    Raises SampleError (422) with the numbers where a turn's rows do not fit.
    """
    experts: Rows | None = None
    indexer: Rows | None = None
    for number, (node, meta) in enumerate(zip(used, metas, strict=False)):
        if replay.experts and meta.get("routed_experts") is not None:
            start = int(node.request.get("routed_experts_start_len") or 0)
            experts = _extended(
                experts, meta["routed_experts"], replay.layers, node, start, f"turn {number}: routed_experts"
            )
        if replay.indexer and meta.get("indexer_topk") is not None:
            layers = meta.get("indexer_topk_num_layers")
            indexer = _extended(indexer, meta["indexer_topk"], layers, node, 0, f"turn {number}: indexer_topk")
    return _cut(experts, length), _cut(indexer, length)


def _extended(held: Rows | None, text: Any, layers: Any, node: Node, start: int, where: str) -> Rows:
    have = 0 if held is None else len(held)
    if start > have:
        raise SampleError(f"{where} begins at row {start}, and the turns before it end at row {have}")
    rows = _decoded(text, layers, node.num_tokens - 1 - start, where)
    if held is None or start == 0:
        return rows
    if held.shape[1:] != rows.shape[1:]:
        raise SampleError(f"{where} has layers and topk {rows.shape[1:]}, earlier turns {held.shape[1:]}")
    return np.concatenate([held[:start], rows])


def _decoded(text: Any, layers: Any, count: int, where: str) -> Rows:
    if not isinstance(text, str) or not isinstance(layers, int) or layers < 1:
        raise SampleError(f"{where} cannot be read: base64 text and a layer count are needed, found {layers!r} layers")
    try:
        values = np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4").astype(np.int32)
    except (binascii.Error, ValueError) as error:
        raise SampleError(f"{where} is not base64 of int32 values: {error}") from error
    if count < 1 or len(values) == 0 or len(values) % (count * layers):
        raise SampleError(f"{where} has {len(values)} values, which do not make {count} rows of {layers} layers")
    return values.reshape(count, layers, -1)


def _cut(rows: Rows | None, length: int) -> Rows | None:
    return None if rows is None else rows[: length - 1]
