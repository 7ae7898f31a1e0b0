"""Keys and values of the sequences that run together: one row each, one tensor per layer.

Row `r` holds positions `0 … length-1` of its sequence at the left, so a token's place in the row is its
position in the sequence and no step ever moves what is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache

GRANULE = 128
"""Rows grow by multiples of this many positions."""


@dataclass(frozen=True)
class Segment:
    """Keys and values of consecutive tokens: per layer a pair of `[tokens, heads, dim]`."""

    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    def __len__(self) -> int:
        return int(self.layers[0][0].shape[0])

    @property
    def nbytes(self) -> int:
        """Memory of the tokens it shows, shared storage counted as its own."""
        return sum(k.numel() * k.element_size() + v.numel() * v.element_size() for k, v in self.layers)

    def part(self, start: int, stop: int) -> Segment:
        """Tokens `start … stop-1`, without copying."""
        return Segment(tuple((k[start:stop], v[start:stop]) for k, v in self.layers))

    def copy(self) -> Segment:
        """The same in memory of its own."""
        return Segment(tuple((k.clone(), v.clone()) for k, v in self.layers))


class KVRows(Cache):  # type: ignore[misc]  # transformers is untyped here
    """The cache object that the model's layers write to and read from.

    A step names its target with `aim`, then runs the model, whose layers call `update`. A subclass of
    `Cache` because models check for it; none of its own storage is used.
    """

    def __init__(self) -> None:
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._rows = 0
        self._width = 0
        self._live_rows = 0
        self._live_width = 0
        self._target: tuple[torch.Tensor, torch.Tensor] | None = None
        self._source: tuple[torch.Tensor, torch.Tensor] | None = None

    def reserve(self, rows: int, width: int) -> None:
        """Have room for `rows` sequences of `width` tokens, keeping what is stored."""
        if rows <= self._rows and width <= self._width:
            return
        self._rows = max(self._rows, _round_up(rows, 8) if rows > self._rows else 0)
        if width > self._width:
            self._width = _round_up(max(width, self._width + self._width // 4), GRANULE)
        self._keys = [self._grown(tensor) for tensor in self._keys]
        self._values = [self._grown(tensor) for tensor in self._values]

    def _grown(self, old: torch.Tensor) -> torch.Tensor:
        new = old.new_zeros((self._rows, self._width, *old.shape[2:]))
        new[: old.shape[0], : old.shape[1]] = old
        return new

    def aim(self, target: tuple[torch.Tensor, torch.Tensor], source: Any, rows: int, width: int) -> None:
        """Say where the next forward's tokens go, and how much of the rows attention sees.

        `target` are the row and the position of each new token; `source` picks them from the model's
        `[rows, columns]` (None: all, one column). Attention sees `rows` rows, `width` positions.
        """
        self._target, self._source = target, source
        self._live_rows, self._live_width = rows, width

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store one layer's new keys and values; called by the model. Returns what attention sees."""
        if layer_idx == len(self._keys):
            self._keys.append(self._empty_like(key_states))
            self._values.append(self._empty_like(value_states))
        stores = (self._keys[layer_idx], self._values[layer_idx])
        for store, new in zip(stores, (key_states, value_states), strict=True):
            by_token = new.transpose(1, 2)
            store[self._target] = by_token[:, 0] if self._source is None else by_token[self._source]
        keys, values = (s[: self._live_rows, : self._live_width].transpose(1, 2) for s in stores)
        return keys, values

    def _empty_like(self, states: torch.Tensor) -> torch.Tensor:
        # zeros, not empty: a masked-out NaN would still poison the weighted sum of values
        return states.new_zeros((self._rows, self._width, states.shape[1], states.shape[3]))

    def read(self, row: int, start: int, stop: int) -> Segment:
        """A copy of what a row holds at positions `start … stop-1`."""
        pairs = zip(self._keys, self._values, strict=True)
        return Segment(tuple((k[row, start:stop].clone(), v[row, start:stop].clone()) for k, v in pairs))

    def write(self, row: int, start: int, segments: Sequence[Segment]) -> None:
        """Put segments into a row, one after the other, from position `start`."""
        for segment in segments:
            stop = start + len(segment)
            if not self._keys:
                self._allocate(segment)
            for (key, value), keys, values in zip(segment.layers, self._keys, self._values, strict=True):
                keys[row, start:stop] = key
                values[row, start:stop] = value
            start = stop

    def _allocate(self, like: Segment) -> None:
        shape = (self._rows, self._width)
        self._keys = [key.new_zeros((*shape, *key.shape[1:])) for key, _ in like.layers]
        self._values = [value.new_zeros((*shape, *value.shape[1:])) for _, value in like.layers]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one row over another."""
        for store in (*self._keys, *self._values):
            store[target, :length] = store[source, :length]

    @property
    def token_bytes(self) -> int:
        """Memory of one token; 0 until the first one has been stored."""
        return sum(s.shape[2] * s.shape[3] * s.element_size() for s in (*self._keys, *self._values))

    @property
    def nbytes(self) -> int:
        """Memory of all rows."""
        return self._rows * self._width * self.token_bytes

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many tokens attention sees; part of the interface models expect."""
        return self._live_width

    @property
    def is_compileable(self) -> bool:
        """No; part of the interface models expect."""
        return False


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
