"""A path written out: its ids as numbers, its messages and ids as JSON, as every turn and every record repeats them.

It grows with the conversation, so that a turn writes only what is new in it. The one of a session's last generation is
kept, within a budget for all sessions of a server; one that was let go is written again when it is needed again.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import orjson

from miles_core.session.long_text import dumps_list
from miles_core.types import Message

if TYPE_CHECKING:
    from miles_core.session.tree import Forest, Node

BUDGET = 128 * 2**20
"""Bytes that all sessions of a server keep written."""

IDS_AT_ONCE = 2**16
"""Ids that are written in one go: a third of a millisecond, during which no other thread runs."""


@dataclass(frozen=True, slots=True)
class Written:
    """Messages and ids as the insides of JSON lists."""

    messages: bytes
    ids: bytes

    @classmethod
    def of(cls, messages: Sequence[Message], ids: array[int]) -> Written:
        """Write them."""
        return cls(dumps_list(messages), written_ids(ids))


class Line:
    """The path to `node` (None: the root, with nothing), written out. Its parts are bytes that JSON lists hold."""

    def __init__(self, path: Iterable[Node] = ()) -> None:
        self.node: Node | None = None
        self.tokens: array[int] = array("i")
        self.ids = bytearray()
        self.messages = bytearray()
        for node in path:
            self.grow(node)

    def copy(self) -> Line:
        """One that stays as this is now."""
        other = Line()
        other.node, other.tokens = self.node, self.tokens[:]
        other.ids, other.messages = self.ids[:], self.messages[:]
        return other

    @property
    def size(self) -> int:
        """Bytes."""
        return 4 * len(self.tokens) + len(self.ids) + len(self.messages)

    def grow(self, node: Node, prompt: Written | None = None) -> None:
        """A generation that extends the path; what its prompt adds may be written already."""
        self.ask(node, prompt)
        self.answer(node)

    def ask(self, node: Node, prompt: Written | None = None) -> None:
        """Its prompt alone, as its record shows it; `answer` must follow."""
        self._keep(node.kept)
        self._add(node.added, prompt or Written.of(node.messages[:-1], node.added))

    def answer(self, node: Node) -> None:
        """What was sampled behind the prompt."""
        self._add(node.sampled, Written.of(node.messages[-1:], node.sampled))
        self.node = node

    def _add(self, tokens: array[int], written: Written) -> None:
        if written.messages:
            self.messages += b"," if self.messages else b""
            self.messages += written.messages
        if written.ids:
            self.ids += b"," if self.ids else b""
            self.ids += written.ids
            self.tokens += tokens

    def _keep(self, count: int) -> None:
        """Leave out all but the first ids."""
        if count < len(self.tokens):
            self.ids = bytearray(self.ids_before(count))
            del self.tokens[count:]

    def ids_before(self, count: int) -> bytes | bytearray:
        """The first ids as JSON."""
        if count == 0:
            return b""
        end = len(self.ids)
        for _ in range(len(self.tokens) - count):
            end = self.ids.rindex(b",", 0, end)
        return self.ids[:end]


def written_ids(ids: array[int]) -> bytes:
    """Ids as the inside of a JSON list."""
    numbers = np.frombuffer(ids, dtype=np.int32)
    return b",".join(
        orjson.dumps(numbers[at : at + IDS_AT_ONCE], option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        for at in range(0, len(numbers), IDS_AT_ONCE)
    )


class LineCache:
    """Lets go of the lines of the sessions that were used longest ago, beyond the budget."""

    def __init__(self, budget: int = BUDGET) -> None:
        self._budget = budget
        self._sizes: OrderedDict[Forest, int] = OrderedDict()
        self._total = 0

    def used(self, forest: Forest) -> None:
        """A session's line was used, or has grown."""
        size = forest.line.size if forest.line is not None else 0
        self._total += size - self._sizes.pop(forest, 0)
        self._sizes[forest] = size
        while self._total > self._budget:
            longest_ago, size = self._sizes.popitem(last=False)
            longest_ago.line = None
            self._total -= size

    def forget(self, forest: Forest) -> None:
        """A session has ended."""
        self._total -= self._sizes.pop(forest, 0)
