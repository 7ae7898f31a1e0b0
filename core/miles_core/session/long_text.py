"""Texts of some megabytes in JSON, read and written in pieces: no other thread of Python runs while one piece is.

A text is cut out of the JSON it stands in, which then has a short word in its place. Where it begins is guessed, and
then proved: what is left is read as JSON, and has to have that word where a text may stand.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any

import orjson

_QUOTE = re.compile(rb'(?<!\\)"')
_INSIDE = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
"""A text from wherever in it, up to its end."""
_HALF_ESCAPE = re.compile(rb"\\u(?:[0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2})\Z")
"""The beginning of an escaped character, which may be two escapes long."""
_BEFORE_TEXT = b":[,"


def cut_texts(raw: bytes, piece: int) -> tuple[bytes, dict[str, str]]:
    """JSON with words in place of its texts that are longer than a piece, and these texts by the words.

    Raises orjson.JSONDecodeError if what it takes for a text is none.
    """
    texts: dict[str, str] = {}
    parts: list[bytes] = []
    done = at = low = 0
    step = max(1, piece // 2)
    while at + step <= len(raw):
        start = None
        if not _has_quote(raw, at, at + step):
            start, low = _opening(raw, low, at), max(low, at - 1)  # what was looked at is not looked at again
        if start is None:
            at += step
            continue
        found = _text(raw, start, piece)
        if found is None:  # it does not end, so there is none behind it
            break
        word = secrets.token_hex(16)
        texts[word], end = found
        parts += (raw[done:start], word.encode())
        done, low, at = end, end, end + 1
    return b"".join((*parts, raw[done:])) if parts else raw, texts


def _has_quote(raw: bytes, start: int, end: int) -> bool:
    """Whether a text surely ends or begins there."""
    first = raw.find(b'"', start, end)
    return first >= 0 and _QUOTE.search(raw, first, end) is not None


def _opening(raw: bytes, low: int, at: int) -> int | None:
    """Where the text begins that may go on at a place."""
    quote = raw.rfind(b'"', low, at)
    while quote > low and _escaped(raw, quote):
        quote = raw.rfind(b'"', low, quote)
    return quote + 1 if quote > low and raw[:quote][-64:].rstrip()[-1:] in _BEFORE_TEXT else None


def _escaped(raw: bytes, at: int) -> bool:
    """Whether an odd number of backslashes stands before a place."""
    first = at
    while first > 0 and raw[first - 1] == 0x5C:
        first -= 1
    return (at - first) % 2 == 1


def _text(raw: bytes, start: int, piece: int) -> tuple[str, int] | None:
    """A text from there on, and where it ends; None if it does not."""
    pieces: list[str] = []
    at = start
    while at < len(raw):
        end = _run(raw, at, min(at + piece, len(raw)))
        ended = raw[end : end + 1] == b'"'
        cut = end if ended else _between(raw, end)
        pieces.append(orjson.loads(b'"%s"' % raw[at:cut]))
        if ended:
            return "".join(pieces), end
        if cut <= at:
            return None
        at = cut
    return None


def _run(raw: bytes, at: int, end: int) -> int:
    """How far a text goes on, at most to `end`; not into half an escape."""
    if raw.find(b"\\", at, end) < 0:  # most are plain, and found faster so
        quote = raw.find(b'"', at, end)
        return end if quote < 0 else quote
    found = _INSIDE.match(raw, at, end)
    return found.end() if found else at


def _between(raw: bytes, end: int) -> int:
    """The last place up to `end` that is not inside of a character."""
    while end < len(raw) and raw[end] & 0xC0 == 0x80:
        end -= 1
    # half an escape may be the second half of a character
    while (half := _HALF_ESCAPE.search(raw, max(0, end - 6), end)) and not _escaped(raw, half.start()):
        end = half.start()
    return end


def put_back(value: Any, texts: dict[str, str]) -> bool:
    """Put the texts in place of their words; false if one of those is not there."""
    left, waiting = len(texts), [value]
    while waiting and left:
        outer = waiting.pop()
        places = outer.items() if isinstance(outer, dict) else enumerate(outer) if isinstance(outer, list) else ()
        for place, inner in places:
            if isinstance(inner, (dict, list)):
                waiting.append(inner)
            elif isinstance(inner, str) and inner in texts:
                outer[place] = texts[inner]
                left -= 1
    return left == 0


# -- writing -----------------------------------------------------------------------------------------------------------


LIST_AT_ONCE, TEXT_AT_ONCE = 2**6, 2**16
"""Members of a list, and characters of a text, that are written in one go."""


def dumps_list(values: Sequence[Any]) -> bytes:
    """The inside of a JSON list: what `orjson.dumps` writes, in pieces."""
    if len(values) > LIST_AT_ONCE:
        starts = range(0, len(values), LIST_AT_ONCE)
        return b",".join([dumps_list(values[at : at + LIST_AT_ONCE]) for at in starts])
    if any(map(_has_long_text, values)):
        return b",".join([_dumps_long(value) for value in values])
    return orjson.dumps(values)[1:-1]


def _has_long_text(value: Any) -> bool:
    """Whether it is a message whose text is long; others are written as they are."""
    content = value.get("content") if isinstance(value, dict) else None
    return isinstance(content, str) and len(content) > TEXT_AT_ONCE


def _dumps_long(value: Any) -> bytes:
    if not _has_long_text(value):
        return orjson.dumps(value)
    word = secrets.token_hex(16)
    before, _, behind = orjson.dumps({**value, "content": word}).partition(word.encode())
    text: str = value["content"]
    pieces = [orjson.dumps(text[at : at + TEXT_AT_ONCE])[1:-1] for at in range(0, len(text), TEXT_AT_ONCE)]
    return b"".join((before, *pieces, behind))
