"""Where a request stands in a session's history. Linear histories are a policy over the forest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from miles_core.errors import HistoryError
from miles_core.session.tree import Forest, Node
from miles_core.types import Message

Matcher = Callable[[Message, Message], bool]
"""`(stored, replayed) -> bool`; a fault in it is raised, never read as an answer."""


@dataclass(frozen=True, slots=True)
class Position:
    """The generation a request extends (None: it starts anew) and the messages it adds there."""

    base: Node | None
    appended: tuple[Message, ...]
    head: Node | None
    """The session's last generation when the request was positioned."""


class HistoryPolicy(Protocol):
    """How requests attach to a forest and what a commit leaves of it."""

    def position(self, forest: Forest, messages: Sequence[Message], matches: Matcher) -> Position:
        """Place a request. Raises HistoryError if it fits nowhere."""
        ...

    def accepts(self, forest: Forest, position: Position) -> bool:
        """Whether a turn that was positioned earlier may still be committed."""
        ...

    def commit(self, forest: Forest, node: Node) -> None:
        """Put a finished generation into the forest."""
        ...


class LinearPolicy:
    """One line of turns. A request may roll back at most `max_rollback` generations."""

    def __init__(self, max_rollback: int = 1) -> None:
        self.max_rollback = max_rollback

    def position(self, forest: Forest, messages: Sequence[Message], matches: Matcher) -> Position:
        """Behind everything stored if it all matches, else behind the last generation that does."""
        head = forest.last
        path = head.path() if head else []
        match = _count_matching(path, messages, matches)
        base = next((node for node in reversed(path) if node.num_messages <= match), None)
        discarded = len(path) - (path.index(base) + 1 if base else 0)
        if discarded > self.max_rollback:
            stored = head.num_messages if head else 0
            raise HistoryError(
                f"rollback failed: discard_count={discarded} exceeds "
                f"max_assistant_rollback_steps={self.max_rollback} (stored has {stored} messages, "
                f"request has {len(messages)} messages)"
            )
        return Position(base, tuple(messages[base.num_messages if base else 0 :]), head)

    def accepts(self, forest: Forest, position: Position) -> bool:
        """Only while no other turn was committed since."""
        return forest.last is position.head

    def commit(self, forest: Forest, node: Node) -> None:
        """The new generation becomes the end of the line; a turn it replaced is let go."""
        forest.add(node)
        if len(forest.nodes) > 1 and forest.nodes[-2] is not node.parent:
            forest.forget_all_but(node.path())


def _count_matching(path: Sequence[Node], messages: Sequence[Message], matches: Matcher) -> int:
    count = 0
    for node in path:
        for stored in node.messages:
            if count >= len(messages) or not matches(stored, messages[count]):
                return count
            count += 1
    return count
