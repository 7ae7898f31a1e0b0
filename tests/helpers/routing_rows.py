"""Routing rows of made-up turns, each of which tells its token and the turn that computed it."""

from __future__ import annotations

import base64
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miles_core.session.routing import Replay

LAYERS, TOPK, INDEXER_LAYERS = 2, 3, 1
SHAPES = {"routed_experts": (LAYERS, TOPK), "indexer_topk": (INDEXER_LAYERS, TOPK)}

REPLAYS = (
    Replay(),
    Replay(experts=True, layers=LAYERS),
    Replay(experts=True, incremental=True, layers=LAYERS),
    Replay(experts=True, indexer=True, layers=LAYERS),
    Replay(experts=True, indexer=True, incremental=True, layers=LAYERS),
)

Numbers = dict[str, tuple[int, list[int]]]
"""Of each kind of rows a turn brought: the first one's place, and a number for each."""


class Gap(Exception):
    """The rules refuse the sample: rows that came incrementally have a gap."""


def text(numbers: Sequence[int], key: str) -> str:
    """Rows as an engine sends them, each filled with its number."""
    layers, topk = SHAPES[key]
    return base64.b64encode(np.repeat(np.array(numbers, dtype="<i4"), layers * topk).tobytes()).decode()


@dataclass
class RowEngine:
    """The rows that an engine computes: those of tokens seen before are what they were, unless it starts again."""

    replay: Replay
    marks: list[int] = field(default_factory=list)
    count: int = 0

    def add(self, meta: dict[str, Any], start: int, total: int, draw: random.Random) -> Numbers:
        """Put rows for a turn of `total` tokens into its `meta_info`, now and then none."""
        keys = [k for k, on in (("routed_experts", self.replay.experts), ("indexer_topk", self.replay.indexer)) if on]
        if not keys or total < 2:
            return {}
        self.count += 1
        fresh = min(draw.randrange(total) if draw.random() < 0.2 else total, len(self.marks))
        self.marks[fresh:] = [self.count] * (max(total, len(self.marks)) - fresh)
        found: Numbers = {}
        for key in keys:
            if key == "routed_experts" and draw.random() < 0.03:
                continue
            first = start if key == "routed_experts" or draw.random() < 0.5 else 0
            found[key] = (first, [self.marks[at] * 1000 + at for at in range(first, total - 1)])
            meta[key] = text(found[key][1], key)
        if self.replay.indexer:
            meta["indexer_topk_num_layers"] = INDEXER_LAYERS
        return found


def usable(turns: Sequence[Numbers], replay: Replay) -> int:
    """How many of a sample's turns may stay. Raises Gap."""
    wanted = {k for k, on in (("routed_experts", replay.experts), ("indexer_topk", replay.indexer)) if on}
    seen = False
    for number, rows in enumerate(turns):
        if not wanted <= rows.keys():
            if replay.incremental:
                raise Gap
            if seen:
                return number
        elif wanted:
            seen = True
    return len(turns)


def without_gap(turns: Sequence[Numbers], replay: Replay) -> bool:
    """Whether all the turns may stay."""
    try:
        return usable(turns, replay) == len(turns)
    except Gap:
        return False


def check_rows(found: Any, turns: Sequence[Numbers], key: str, tokens: int) -> None:
    """The rows of a sample are, for each token, those of the last turn that brought one."""
    numbers: list[int] = []
    brought = False
    for rows in turns:
        if key in rows:
            start, more = rows[key]
            assert start <= len(numbers)
            numbers[start:] = more
            brought = True
    if not brought:
        assert found is None
        return
    assert found.dtype == np.int32
    assert found.shape == (tokens - 1, *SHAPES[key])
    assert (found == np.array(numbers[: tokens - 1], dtype=np.int32)[:, None, None]).all()
