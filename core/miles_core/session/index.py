"""Where the paths of a tree lead, message by message: finds candidates without asking the matcher about every node."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles_core.session.tree import Node


class PathIndex:
    """The paths of a tree's generations, by the keys that a matcher gives their messages.

    Messages that match have equal keys, so a generation that a request may extend is always found along the
    request's own keys. The keys themselves are compared, no digests of them; and since different messages may share
    a key, what is found is a candidate, about which the matcher still decides. A path costs one entry for each
    message that no earlier path had at its place.
    """

    def __init__(self) -> None:
        self._steps: dict[tuple[int, Hashable], int] = {}
        self._ends: list[list[Node]] = [[]]
        self._place_of: dict[int, int] = {}

    def add(self, node: Node, keys: Iterable[Hashable]) -> None:
        """Take in a generation, `keys` being those of its own messages; its parent is there already."""
        place = self._place_of[node.parent.id] if node.parent else 0
        for key in keys:
            following = self._steps.setdefault((place, key), len(self._ends))
            if following == len(self._ends):
                self._ends.append([])
            place = following
        self._ends[place].append(node)
        self._place_of[node.id] = place

    def along(self, keys: Iterable[Hashable], start: Node | None = None) -> list[Sequence[Node]]:
        """The generations whose paths end on the way of `keys`, the shallowest first; in order of commit at a place.

        The way begins where the path of `start` ends (None: at the root), with the generations that end there too.
        """
        place = self._place_of[start.id] if start else 0
        found: list[Sequence[Node]] = [self._ends[place]] if self._ends[place] else []
        for key in keys:
            step = self._steps.get((place, key))
            if step is None:
                break
            place = step
            if self._ends[place]:
                found.append(self._ends[place])
        return found
