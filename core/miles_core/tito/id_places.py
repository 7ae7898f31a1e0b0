"""Where in many ids some given ones are, told without a Python object for each."""

from __future__ import annotations

from array import array
from collections.abc import Collection

import numpy as np


class IdPlaces:
    """Finds the ids it was made of."""

    def __init__(self, ids: Collection[int]) -> None:
        self._table = np.zeros(max(ids, default=0) + 3, dtype=np.bool_)
        """By id; the last two places are for ids above all of them and below zero."""
        self._table[sorted(ids)] = True

    def find(self, ids: array[int]) -> list[int]:
        """Their places in int32 ids, in order."""
        numbers = np.frombuffer(ids, dtype=np.int32) if ids else np.empty(0, np.int32)
        found: list[int] = np.flatnonzero(self._table[np.clip(numbers, -1, len(self._table) - 2)]).tolist()
        return found
