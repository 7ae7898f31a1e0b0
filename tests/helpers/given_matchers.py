"""Matchers as users write them, given to servers by dotted path."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

Message = dict[str, Any]


def without_case(ours: Message, theirs: Message) -> bool:
    """Texts may differ in case; its arguments have names of their own."""
    return ours["role"] == theirs["role"] and _folded(ours) == _folded(theirs)


class Sorted:
    """The same, with keys that tell only how long a text is."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, Any]] = []

    def message_matches(self, stored: Message, replayed: Message) -> bool:
        """Notes what it was asked."""
        self.asked.append((stored.get("content"), replayed.get("content")))
        return without_case(stored, replayed)

    def message_key(self, message: Message) -> Hashable:
        """Equal for texts that differ in case, and for others."""
        return (message["role"], len(_folded(message)))


def _folded(message: Message) -> str:
    return str(message.get("content") or "").casefold()
