"""JSON inside a text that is still growing, whose end may stand inside one of its strings."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

JSON_SPACE = " \t\r\n"
DEEPEST = 256
"""How deep JSON may be nested; far below where the interpreter gives up, whatever the caller's own depth."""

_STRING_PART = re.compile(r'[^"\\\x00-\x1f]*(?:\\.[^"\\\x00-\x1f]*)*')
_BRACKETS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|(?P<open>[\[{])|(?P<close>[\]}])', re.DOTALL)


class JsonText:
    """JSON that begins at `start` of a text; read each time that something has come which may end it.

    What was seen is not looked at again, so that a string holding a thousand ends costs no more than a long one.
    """

    def __init__(self, start: int) -> None:
        self._start = start
        self._open_at: int | None = None  # a place inside a string, up to which it is known

    def read(self, text: str, end: int) -> tuple[Any, bool] | None:
        """The value of the JSON up to `end`, and whether it is one; None if `end` stands inside a string."""
        if self._open_at is not None and self._in_string(text, end):
            return None
        try:
            value = decoded(text[self._start : end])
        except json.JSONDecodeError as error:
            if not error.msg.startswith("Unterminated string"):
                return None, False
            self._open_at = self._start + error.pos + 1
            return None if self._in_string(text, end) else (None, False)
        except (ValueError, RecursionError):
            return None, False
        return value, True

    def _in_string(self, text: str, end: int) -> bool:
        """Whether `end` stands in a string; reading strings only, from where the last one was seen to be open."""
        at = self._open_at
        assert at is not None
        while True:
            part = _STRING_PART.match(text, at, end)
            assert part is not None  # it may be empty
            at = part.end()
            if at == end or (at == end - 1 and text[at] == "\\"):
                self._open_at = at
                return True
            if text[at] != '"':
                return False  # what no string may hold
            at = text.find('"', at + 1, end) + 1
            if not at:
                return False


def decoded(text: str) -> Any:
    """The value of JSON text. Raises ValueError or RecursionError if it is none: strict, without NaN, not nested too
    deep, and encodable as UTF-8."""
    value = json.loads(text, parse_constant=_no_constant)
    text.encode("utf-8")
    if "\\u" in text:  # a lone surrogate
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    if text.count("[") + text.count("{") > DEEPEST and _depth(text) > DEEPEST:
        raise ValueError("nested too deep")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _depth(text: str) -> int:
    """How deep valid JSON is nested."""
    depth = deepest = 0
    for found in _BRACKETS.finditer(text):
        if found["open"]:
            depth += 1
            deepest = max(deepest, depth)
        elif found["close"]:
            depth -= 1
    return deepest
