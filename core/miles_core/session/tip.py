"""The path of the generation committed last, laid out flat: most requests repeat it as the request before did.

An agent sends its whole history with every turn, spelled as it spelled it the last time. What is repeated is told at
the speed of memory; it was checked and matched before, and matchers are pure, so it need not be again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from miles_core.types import Message

if TYPE_CHECKING:
    from miles_core.session.tree import Node


class Tip:
    """Messages from the root to the last generation, and how requests spelled them.

    The messages are the nodes' own, and a request's spelling shares their texts, so this holds little for each.
    """

    def __init__(self) -> None:
        self.node: Node | None = None
        self.messages: list[Message] = []
        self._spelled: list[Message] = []
        """The first of the messages, as a request spelled them that the matcher said yes to."""
        self._numbers: list[int] = []
        """Where in there are numbers or booleans: `==` takes true for 1, and 1 for 1.0."""

    def copy(self) -> Tip:
        """One that goes on by itself."""
        other = Tip()
        other.node, other.messages = self.node, self.messages[:]
        other._spelled, other._numbers = self._spelled[:], self._numbers[:]
        return other

    def move(self, node: Node) -> None:
        """Lay out the path of a generation that was just committed."""
        if node.parent is not self.node:
            self._turn_to(node.path()[:-1])
        self.messages += node.messages
        self.node = node

    def _turn_to(self, path: Sequence[Node]) -> None:
        """Another branch; what it has in common with the last one stays."""
        left = self.messages
        self.messages = [message for step in path for message in step.messages]
        common = _first(zip(left, self.messages, strict=False), lambda pair: pair[0] is not pair[1])
        self._forget_after(common)

    def _forget_after(self, count: int) -> None:
        del self._spelled[count:]
        self._numbers = [at for at in self._numbers if at < count]

    def _note(self, message: Message) -> None:
        if _has_numbers(message):
            self._numbers.append(len(self._spelled))
        self._spelled.append(message)

    def repeated(self, messages: Sequence[Message]) -> int:
        """How many of the first `messages` are spelled as they were before, but for the order of keys."""
        known = self._spelled[: len(messages)]
        count = len(known)
        if known != messages[:count]:
            count = _first(zip(known, messages, strict=False), lambda pair: pair[0] != pair[1])
        inside = [at for at in self._numbers if at < count]
        if _written([known[at] for at in inside]) != _written([messages[at] for at in inside]):
            count = next(at for at in inside if _written(known[at]) != _written(messages[at]))
        return count

    def match(self, messages: Sequence[Message], repeated: int, same: Callable[[Message, Message], bool]) -> int:
        """How many of the first `messages` match the path's; `same` is asked about those that are not `repeated`."""
        count, end = repeated, min(len(self.messages), len(messages))
        while count < end and same(self.messages[count], messages[count]):
            if count < len(self._spelled) and _written(self._spelled[count]) != _written(messages[count]):
                self._forget_after(count)
            if count == len(self._spelled):
                self._note(_sharing(messages[count], self.messages[count]))
            count += 1
        return count

    def reached(self, count: int) -> Node | None:
        """The last generation of the path that ends within its first `count` messages."""
        node = self.node
        while node is not None and node.num_messages > count:
            node = node.parent
        return node


def _first(pairs: Any, differs: Callable[[tuple[Message, Message]], bool]) -> int:
    """The place of the first pair that differs, or how many there are."""
    at = -1
    for at, pair in enumerate(pairs):
        if differs(pair):
            return at
    return at + 1


def _sharing(message: Message, stored: Message) -> Message:
    """The message with the stored one's texts where they are equal."""
    return {key: known if (known := stored.get(key)) == value and type(known) is type(value) is str else value
            for key, value in message.items()}  # fmt: skip


def _written(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def _has_numbers(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_numbers, value.values()))
    return any(map(_has_numbers, value)) if isinstance(value, list) else isinstance(value, (int, float))
