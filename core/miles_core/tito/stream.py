"""Ids to text as they come."""

from __future__ import annotations

import re
from collections.abc import Iterable

from miles_core.tito.tokenizer import Tokenizer

_CONTEXT = 6
"""Ids decoded again before new ones: what a tokenizer writes for an id may depend on those before it."""
_LOOSE = 16
"""From how many ids on that are not whole characters the older ones are let go: a character has four bytes at most."""
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TextStream:
    """Text of ids; characters split over tokens are held back until whole. `hidden` ids have no text.

    Ids outside the tokenizer have no text either. What comes out does not depend on how the ids are split.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        # Tokenizers with one token a byte beside their pieces decode a run of those as a whole or not at all.
        self._byte_runs = tokenizer.token_to_id("<0x0A>") is not None
        self._ids: list[int] = []
        self._start = 0  # the ids before it are out as text
        self._given = 0  # how many characters of the text behind it are out

    def feed(self, ids: Iterable[int]) -> str:
        """The text that more ids complete."""
        self._ids.extend(i for i in ids if i not in self._hidden and self._spelling(i) is not None)
        end = len(self._ids)
        while self._byte_runs and end > self._start and self._is_byte(self._ids[end - 1]):
            end -= 1
        return self._take(end, final=False)

    def finish(self) -> str:
        """The text that was held back."""
        return self._take(len(self._ids), final=True)

    def _spelling(self, token_id: int) -> str | None:
        return self._tokenizer.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None

    def _is_byte(self, token_id: int) -> bool:
        return _BYTE.fullmatch(self._spelling(token_id) or "") is not None

    def _take(self, end: int, *, final: bool) -> str:
        if self._start == end:
            return ""
        text = self._text(end)
        # An unfinished character at the end shows as one replacement character.
        certain = text if final else text.removesuffix("\ufffd")
        out = certain[self._given :]
        if len(certain) == len(text):
            self._start, self._given = end, 0
        else:
            self._given = max(self._given, len(certain))
            self._let_go(end, text)
        return out

    def _text(self, end: int) -> str:
        """The text of the ids from `_start` on."""
        context = max(0, self._start - _CONTEXT)
        before = self._tokenizer.decode(self._ids[context : self._start])
        return self._tokenizer.decode(self._ids[context:end])[len(before) :]

    def _let_go(self, end: int, text: str) -> None:
        """Move the start on when many ids are no whole characters, so that each costs the same."""
        cut = end - _LOOSE // 2
        if end - self._start > _LOOSE and text.startswith(head := self._text(cut)) and len(head) <= self._given:
            self._start, self._given = cut, self._given - len(head)


def held(text: str, *ahead: str) -> int:
    """Length of the longest end of `text` that could be the beginning of one of `ahead`."""
    longest = 0
    for tag in ahead:
        for size in range(min(len(tag), len(text)), longest, -1):
            if tag.startswith(text[-size:]):
                longest = size
                break
    return longest
