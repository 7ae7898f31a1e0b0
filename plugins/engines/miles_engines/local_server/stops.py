"""Stop strings: finding them while tokens are sampled, and cutting them off what is shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Decode = Callable[[Sequence[int]], str]
Encode = Callable[[str], list[int]]

REPLACEMENT = "\ufffd"
"""What an incomplete character decodes to."""


@dataclass(frozen=True)
class StopStrings:
    """A request's stop strings, and how to read tokens as text."""

    strings: tuple[str, ...] = ()
    decode: Decode = lambda ids: ""
    encode: Encode = lambda text: []

    def found(self, output_ids: Sequence[int]) -> str | None:
        """The stop string that the last token completed, if any; looks at the tail only."""
        if not self.strings:
            return None
        # a token is at least one byte of text, special ones apart, so no stop string is longer than this
        longest = max(len(string.encode()) for string in self.strings)
        tail = self.decode(output_ids[-(longest + 4) :])
        return next((string for string in self.strings if string in tail), None)

    def may_begin(self, text: str) -> bool:
        """Whether the end of `text` could be the beginning of a stop string, or of a character."""
        if text.endswith(REPLACEMENT):
            return True
        return any(text.endswith(string[:size]) for string in self.strings for size in range(1, len(string)))

    def cut(self, ids: Sequence[int], matched: str) -> list[int]:
        """Ids whose text is that of `ids` before the stop string.

        A token that the stop string begins inside is replaced by what encodes its remaining text: the
        result is for showing and parsing, never for training.
        """
        text = self.decode(ids)
        at = text.find(matched)
        if at < 0:
            return list(ids)
        kept = _longest_within(ids, self.decode, at)
        rest = text[len(self.decode(ids[:kept])) : at]
        return [*ids[:kept], *(self.encode(rest) if rest else ())]


def _longest_within(ids: Sequence[int], decode: Decode, size: int) -> int:
    """How many leading ids decode to whole text of at most `size` characters."""
    kept = 0
    for count in range(1, len(ids) + 1):
        text = decode(ids[:count])
        if len(text) > size:
            break
        if not text.endswith(REPLACEMENT):
            kept = count
    return kept


class StopGate:
    """Holds back streamed tokens that may turn out to be part of a stop string."""

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._held: list[int] = []

    def feed(self, ids: Sequence[int]) -> list[int]:
        """The tokens that may be shown now."""
        if not self._stops.strings:
            return list(ids)
        self._held.extend(ids)
        if self._stops.may_begin(self._stops.decode(self._held)):
            return []
        released, self._held = self._held, []
        return released

    def finish(self, ids: Sequence[int], matched: object) -> list[int]:
        """The last tokens to show: `ids` are new, `matched` is what ended the generation."""
        held, self._held = [*self._held, *ids], []
        return self._stops.cut(held, matched) if isinstance(matched, str) else held
