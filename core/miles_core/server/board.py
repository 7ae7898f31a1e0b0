"""What the processes of one server know of each other: a few numbers of each, in memory that they share."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

MOST = 256
"""How many processes a server may have: the first two hex digits of a session's id say which has it."""

UP, SESSIONS, TURNS = range(3)
_FIELDS = 3
_WIDTH = 8


class Board:
    """A row of numbers for each process: whether it is up, its open sessions, its turns in flight.

    Every process writes its own row alone and reads them all; a number is read and written whole. Made before the
    processes are.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._cells = memoryview(mmap.mmap(-1, count * _FIELDS * _WIDTH)).cast("q")

    def get(self, number: int, field: int) -> int:
        """One number of a process."""
        return self._cells[number * _FIELDS + field]

    def put(self, number: int, field: int, value: int) -> None:
        """Write one."""
        self._cells[number * _FIELDS + field] = value

    def others(self, number: int, field: int) -> int:
        """The sum over all processes but one."""
        return sum(self._cells[field::_FIELDS]) - self.get(number, field)

    def clear(self, number: int) -> None:
        """A process has ended, and what it had with it."""
        for field in range(_FIELDS):
            self.put(number, field, 0)

    def up(self) -> Iterator[int]:
        """The processes that serve."""
        return (number for number in range(self.count) if self.get(number, UP))
