"""The engine's answer as a session keeps it: byte for byte, but for what the answer before it says already.

With whole routing data every answer of a session repeats the rows of all tokens before it, about two kilobytes for
each. So the text of rows is kept as where it goes on differently from an earlier one, and the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ROW_KEYS = ("routed_experts", "indexer_topk")
"""The texts of `meta_info` that grow with the sequence."""

STEP = 2**16
"""Characters that are compared at once where texts differ; the difference is found to the character."""


WORTH_SHARING = 1024
"""Characters; for less, an earlier answer that the session has let go is not kept."""


@dataclass(frozen=True, slots=True, eq=False)
class RowText:
    """Base64 of routing rows, as the engine wrote it: the first `shared` characters of `earlier`, then `own`."""

    earlier: RowText | None = field(repr=False)
    shared: int
    own: bytes
    padding: int
    """How many `=` the text ends with."""

    @property
    def size(self) -> int:
        """How many bytes the text stands for."""
        return (self.shared + len(self.own)) // 4 * 3 - self.padding

    def pieces(self) -> list[bytes]:
        """The text, in order."""
        found: list[bytes] = []
        text: RowText | None = self
        end = self.shared + len(self.own)
        while text is not None:
            if end > text.shared:
                found.append(text.own[: end - text.shared])
                end = text.shared
            text = text.earlier
        found.reverse()
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What the engine answered. `rows` has the row texts that were there, None for one that is no text."""

    parts: tuple[bytes | RowText, ...]
    rows: Mapping[str, RowText | None]
    indexer_layers: Any = None

    @property
    def raw(self) -> bytes:
        """The answer as it came."""
        return b"".join(
            piece for part in self.parts for piece in ([part] if isinstance(part, bytes) else part.pieces())
        )


def kept_answer(raw: bytes, meta: Mapping[str, Any], beside: Sequence[Answer]) -> Answer:
    """The answer `raw`, whose `meta_info` is `meta`, sharing what it can with those `beside` it."""
    rows: dict[str, RowText | None] = {}
    parts: list[bytes | RowText] = []
    rest = raw
    for key, text in sorted(_row_texts(meta).items(), key=lambda item: raw.find(item[1] or b"")):
        if text is None:
            rows[key] = None
            continue
        known = [one for answer in beside if (one := answer.rows.get(key)) is not None]
        rows[key] = found = _row_text(text, known)
        head, there, tail = rest.partition(text) if text else (rest, b"", b"")
        if there:  # else it is spelled with escapes, and the answer keeps it whole
            parts += [head, found]
            rest = tail
    return Answer((*parts, rest), rows, meta.get("indexer_topk_num_layers"))


def _row_texts(meta: Mapping[str, Any]) -> dict[str, bytes | None]:
    """The texts that are there; None for a value that is not one."""
    found = {key: meta[key] for key in ROW_KEYS if meta.get(key) is not None}
    return {key: value.encode("utf-8") if isinstance(value, str) else None for key, value in found.items()}


def _row_text(text: bytes, known: Sequence[RowText]) -> RowText:
    shared, earlier = max(
        ((_common(text, one.pieces()), one) for one in known), key=lambda pair: pair[0], default=(0, None)
    )
    if shared < WORTH_SHARING:
        shared, earlier = 0, None
    while earlier is not None and earlier.shared >= shared:  # so that attempts at one place make no chain
        earlier = earlier.earlier
    return RowText(earlier, shared, text[shared:], text[-2:].count(b"="))


def _common(text: bytes, pieces: Sequence[bytes]) -> int:
    """How many characters at the start of a text are those of another, given in pieces."""
    at = 0
    for piece in pieces:
        if text.startswith(piece, at):
            at += len(piece)
            continue
        for step in range(0, len(piece), STEP):
            part = piece[step : step + STEP]
            if text.startswith(part, at):
                at += len(part)
                continue
            return at + next(
                (n for n, (a, b) in enumerate(zip(text[at:], part, strict=False)) if a != b), len(text) - at
            )
    return at
