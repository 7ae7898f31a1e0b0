"""Ids of a conversation's rendering, without tokenizing again what the session tokenized before.

A tokenizer takes the text between two control tokens for itself. So where the session's own ids between two control
tokens are known to be the encoding of their text, and that text is the rendering's, they are the rendering's ids.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING

from miles_core.tito.id_places import IdPlaces

if TYPE_CHECKING:
    from miles_core.tito.bound import BoundFamily

REMEMBERED = 2**16
"""How many sampled texts are known to be canonical or not, for all sessions together; about 8 MB."""

Span = tuple[int, int]


class RenderedIds:
    """Gives the ids of renderings; one for each bound family, whose tokenizer never changes."""

    def __init__(self, bound: BoundFamily) -> None:
        self._bound = bound
        added = bound.tokenizer.added_tokens.values()
        self._ends = frozenset(bound.boundary_ids.intersection(added))
        """Control tokens, at which text is cut before it is tokenized; a boundary of another kind is inside a text."""
        self._canonical: OrderedDict[bytes, bool] = OrderedDict()
        """By a digest of ids: whether they are the encoding of the text they spell. True for ever, so only bounded."""

    def of(self, text: str, ids: array[int], encoded: Sequence[Span]) -> array[int]:
        """The ids of `text`, which is likely what `ids` spell. `encoded` are the spans of `ids` that came from text.

        Always what encoding the text gives; the session's own ids only save work.
        """
        tokenizer = self._bound.tokenizer
        parts = tokenizer.cut(text, self._ends)
        if parts is None:
            return tokenizer.encode_array(text)
        segments = list(self._segments(ids, encoded))
        own = zip(segments, self._texts(ids, segments), strict=True)
        out = array("i")
        for token, part in parts:
            if token is not None:
                out.append(token)
            (segment, sure), spelled = next(own, ((None, False), ""))
            if part and segment is not None and spelled == part and (sure or self._checked(segment)):
                out.extend(segment)
            elif part:
                out.extend(tokenizer.encode_array(part))
        return out

    def _texts(self, ids: array[int], segments: Sequence[tuple[array[int], bool]]) -> Sequence[str]:
        """The text of each segment."""
        decode = self._bound.tokenizer.decode
        together = self._bound.tokenizer.split(decode(ids), self._ends)  # much faster than one by one
        if together is not None and len(together) == len(segments):  # no control token is spelled by other ids
            return [text for _, text in together]
        return [decode(segment) for segment, _ in segments]

    def _segments(self, ids: array[int], encoded: Sequence[Span]) -> Iterator[tuple[array[int], bool]]:
        """The ids between control tokens, and whether they are sure to be the encoding of their text."""
        cuts = [-1, *self._boundaries.find(ids), len(ids)]
        spans = iter(encoded)
        start, end = next(spans, (0, 0))
        for left, right in pairwise(cuts):
            while end <= left and (span := next(spans, None)) is not None:
                start, end = span
            yield ids[left + 1 : right], start <= left and right < end

    @cached_property
    def _boundaries(self) -> IdPlaces:
        return IdPlaces(self._ends)

    def _checked(self, ids: array[int]) -> bool:
        """Whether ids are the encoding of the text they spell; asked once about the same ones."""
        key = blake2b(ids, digest_size=16).digest()
        known = self._canonical.get(key)
        if known is None:
            tokenizer = self._bound.tokenizer
            known = tokenizer.encode_array(tokenizer.decode(ids)) == ids
            if len(self._canonical) >= REMEMBERED:
                self._canonical.popitem(last=False)
            self._canonical[key] = known
        return known
