"""Sequences that run together: which row each has, and what it feeds to the next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from miles_engines.local_server.job import Job
from miles_engines.local_server.kv import KVRows, Segment
from miles_engines.local_server.model import Work
from miles_engines.local_server.sampling import Row


class Running:
    """A job that has a row: its tokens so far, and how many of them have keys and values."""

    def __init__(self, job: Job, stop_ids: frozenset[int]) -> None:
        self.job = job
        self.tokens = list(job.prompt)
        self.computed = 0
        self.stop_ids = stop_ids
        self._free = Row(job.params, (), self.tokens, job.output_ids)
        self._held = replace(self._free, banned=tuple(stop_ids))  # before `min_new_tokens`

    @property
    def pending(self) -> int:
        """Tokens that the model has not seen yet."""
        return len(self.tokens) - self.computed

    @property
    def row(self) -> Row:
        """How to draw its next token: stop tokens are not allowed before `min_new_tokens`."""
        early = len(self.job.output_ids) < self.job.params.min_new_tokens
        return self._held if early else self._free

    def work(self, limit: int) -> Work:
        """Its next tokens, at most `limit`."""
        return Work(self.computed, self.tokens[self.computed : self.computed + limit])


RELEASE_ABOVE = 64 << 20
"""Bytes; rows that take more than this give their memory back when the last sequence has left."""


class Rows:
    """Sequences in rows `0 … n-1` of one `KVRows`, without gaps."""

    def __init__(self) -> None:
        self.kv = KVRows()
        self.running: list[Running] = []

    def __len__(self) -> int:
        return len(self.running)

    def add(self, running: Running, segments: Sequence[Segment]) -> None:
        """Give a sequence a row and fill it with what is already known."""
        row = len(self.running)
        self.kv.reserve(row + 1, len(running.tokens))
        self.kv.write(row, 0, segments)
        running.computed = sum(map(len, segments))
        self.running.append(running)

    def remove(self, row: int) -> Running:
        """Take a sequence out; the last one moves into its row."""
        taken = self.running[row]
        last = self.running.pop()
        if last is not taken:
            self.kv.move(len(self.running), row, last.computed)
            self.running[row] = last
        if not self.running and self.kv.nbytes > RELEASE_ABOVE:
            self.kv = KVRows()
        return taken
