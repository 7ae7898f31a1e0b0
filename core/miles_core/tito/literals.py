"""Finding fixed texts, such as control tokens, in text of any length without holding other threads up."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from collections.abc import Set as AbstractSet

WINDOW = 2**16
"""Characters that are searched at once: well under a millisecond, which other threads wait, since `re` keeps the
interpreter to itself."""


class Literals:
    """Finds given texts from left to right, the longest of those that begin at one place."""

    def __init__(self, texts: Collection[str], *, window: int = WINDOW) -> None:
        ordered = sorted(filter(None, texts), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered))) if ordered else None
        self._beyond = len(ordered[0]) - 1 if ordered else 0
        self._window = window

    def find(self, text: str) -> Iterator[re.Match[str]]:
        """Every occurrence, none overlapping another."""
        pattern = self._pattern
        if pattern is None:
            return iter(())
        return pattern.finditer(text) if len(text) <= self._window else self._in_windows(pattern, text)

    def count(self, text: str) -> int:
        """How many occurrences there are."""
        return sum(1 for _ in self.find(text))

    def _in_windows(self, pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
        at = 0
        while at < len(text):
            end = at + self._window
            # what begins in the window is seen whole
            for found in pattern.finditer(text, at, end + self._beyond):
                if found.start() >= end:
                    break
                yield found
                at = found.end()
            at = max(at, end)


def are_apart(texts: AbstractSet[str]) -> bool:
    """Whether none of them is in another, nor begins where another has not ended."""
    prefixes = {text[:end] for text in texts for end in range(1, len(text))}
    firsts, lengths = {text[0] for text in texts}, {len(text) for text in texts}
    for text in texts:
        inside = [at for at in range(1, len(text)) if text[at] in firsts]
        if text in prefixes or any(text[at:] in prefixes for at in inside):
            return False
        if any(text[at : at + length] in texts for at in inside for length in lengths):
            return False
    return True
