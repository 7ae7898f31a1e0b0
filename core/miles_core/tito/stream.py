"""Ids to text as they come."""

from __future__ import annotations

from collections.abc import Iterable

from miles_core.tito.tokenizer import Tokenizer


class TextStream:
    """Text of ids; characters split over tokens are held back until whole. `hidden` ids have no text."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._ids: list[int] = []
        self._start = 0  # the ids before it are out as text, and end on a whole character
        self._given = 0  # how many characters of the text behind it are out

    def feed(self, ids: Iterable[int]) -> str:
        """The text that more ids complete."""
        self._ids.extend(i for i in ids if i not in self._hidden)
        return self._take(final=False)

    def finish(self) -> str:
        """The text that was held back."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        if self._start == len(self._ids):
            return ""
        context = max(0, self._start - 6)
        before = self._tokenizer.decode(self._ids[context : self._start])
        text = self._tokenizer.decode(self._ids[context:])[len(before) :]
        certain = text if final else text.rstrip("\ufffd")
        out = certain[self._given :]
        if len(certain) == len(text):
            self._start, self._given = len(self._ids), 0
        else:
            self._given = max(self._given, len(certain))
        return out


def held(text: str, *ahead: str) -> int:
    """Length of the longest end of `text` that could be the beginning of one of `ahead`."""
    longest = 0
    for tag in ahead:
        for size in range(min(len(tag), len(text)), longest, -1):
            if tag.startswith(text[-size:]):
                longest = size
                break
    return longest
