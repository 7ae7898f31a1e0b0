"""JSON of some megabytes, read in pieces: no other thread of Python runs while one piece of JSON is read.

A body is long because its messages or tools are many. Such a list is cut between two of its objects. Where that is, is
guessed and then proved: JSON is read from left to right, so if what stands before a cut is a list of whole values once
it is closed, the cut is between two of them, whatever follows.
"""

from __future__ import annotations

import re
import secrets
from typing import Any

import orjson

PIECE = 2**17
"""Bytes that are read at once: a millisecond."""
LISTS = 4
"""How many lists of a body are cut; each costs a copy of what follows it."""

_LIST = re.compile(rb'"(messages|tools)"\s*:\s*\[\s*(?=\{)')
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")


def loads_long(raw: bytes, *, piece: int = PIECE) -> Any:
    """What `orjson.loads` reads. Raises orjson.JSONDecodeError as it does."""
    try:
        return _loads(raw, piece, LISTS)
    except orjson.JSONDecodeError:
        return orjson.loads(raw)  # says where in the whole


def _loads(raw: bytes, piece: int, lists: int) -> Any:
    found = _LIST.search(raw) if lists and len(raw) > piece else None
    if found is None:
        return orjson.loads(raw)
    try:
        head = orjson.loads(raw[: found.end()] + b"]}")
    except orjson.JSONDecodeError:  # the list is inside of something else
        return orjson.loads(raw)
    values, at = _values(raw, found.end(), piece)
    ours = secrets.token_hex(16)  # no key of the body's
    rest = _loads(b'{"%s":[' % ours.encode() + raw[at:], piece, lists - 1)
    values += rest.pop(ours)
    return {**head, found[1].decode(): values, **rest}  # of a key that comes twice, the last value counts


def _values(raw: bytes, at: int, piece: int) -> tuple[list[Any], int]:
    """The values of a list of objects from there on, but for the last ones; and where these begin."""
    values: list[Any] = []
    size = piece
    while len(raw) - at > size:
        cut = _BETWEEN.search(raw, at + size, at + 2 * size)
        try:
            values += orjson.loads(b"[" + raw[at : cut.start() + 1] + b"]") if cut else ()
        except orjson.JSONDecodeError:  # inside of a text or of an object, or behind the end of the list
            cut = None
        at, size = (cut.end(), piece) if cut else (at, 2 * size)
    return values, at
