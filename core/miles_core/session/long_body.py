"""JSON of some megabytes, read in pieces: no other thread of Python runs while one piece of JSON is read.

A body is long because its messages or tools are many, or because a text is (`long_text.py`). A list is cut between two
of its objects. Where that is, is guessed and then proved: JSON is read from left to right, so if what stands before a
cut is a list of whole values once it is closed, the cut is between two of them, whatever follows.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from miles_core.session.long_text import cut_texts, put_back

PIECE = 2**17
"""Bytes that are read at once: a millisecond."""
GUESSES = 6
"""How many places to cut are tried; for none of them, a piece becomes longer."""

_LISTS = (b"messages", b"tools")
_OPENING = re.compile(rb"\s*:\s*\[\s*(?=\{)")
_BETWEEN = (b"},{", b"}, {")
"""How lists are written; cutting none of another spelling is no fault."""


def loads_long(raw: bytes, *, piece: int = PIECE) -> Any:
    """What `orjson.loads` reads. Raises orjson.JSONDecodeError as it does."""
    try:
        short, texts = cut_texts(raw, piece)
        value = _loads(short, piece, _LISTS)
        if not texts or put_back(value, texts):
            return value
    except orjson.JSONDecodeError:
        pass
    return orjson.loads(raw)  # an error says where in the whole


def _loads(raw: bytes, piece: int, lists: Sequence[bytes]) -> Any:
    """Each list is cut once, since what follows it is copied."""
    if len(raw) <= piece:
        return orjson.loads(raw)
    for start, name in sorted((start, name) for name in lists if (start := _start(raw, name)) is not None):
        values, at = _values(raw, start, piece)
        if not values:
            continue
        try:
            head = orjson.loads(raw[:start] + b"]}")
        except orjson.JSONDecodeError:  # the list is inside of something else
            continue
        ours = secrets.token_hex(16)  # no key of the body's
        rest = _loads(b'{"%s":[' % ours.encode() + raw[at:], piece, [other for other in lists if other != name])
        values += rest.pop(ours)
        return {**head, name.decode(): values, **rest}  # of a key that comes twice, the last value counts
    return orjson.loads(raw)


def _start(raw: bytes, name: bytes) -> int | None:
    """Where the objects of a list begin, if it stands there."""
    at = raw.find(b'"%s"' % name)
    found = _OPENING.match(raw, at + len(name) + 2) if at >= 0 else None
    return found.end() if found else None


def _values(raw: bytes, at: int, piece: int) -> tuple[list[Any], int]:
    """The values of a list of objects from there on, but for the last ones; and where these begin."""
    values: list[Any] = []
    size = piece
    while len(raw) - at > size:
        for end, following in _guesses(raw, at + size, at + 2 * size):
            try:
                values += orjson.loads(b"[" + raw[at:end] + b"]")
            except orjson.JSONDecodeError:  # inside of a text or of an object, or behind the end of the list
                continue
            at, size = following, piece
            break
        else:
            size *= 2
    return values, at


def _guesses(raw: bytes, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Where one object may end and the next one begin: the first few places in a stretch of text."""
    between = next((mark for mark in _BETWEEN if raw.find(mark, start, end) >= 0), _BETWEEN[0])
    for _ in range(GUESSES):
        found = raw.find(between, start, end)
        if found < 0:
            return
        start = found + len(between)
        yield found + 1, start - 1
