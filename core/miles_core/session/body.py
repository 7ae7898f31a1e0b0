"""JSON bodies as they come in: parsed strictly, and no deeper than they can be written again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from miles_core.errors import RequestError

MAX_DEPTH = 128
"""Levels of nesting in a request's body."""


def parse_body(raw: bytes) -> dict[str, Any]:
    """The request body as an object. Raises RequestError (400) for anything else, lone surrogates included."""
    body = load_body(raw)
    check_depth(body)
    return body


def load_body(raw: bytes, loads: Callable[[bytes], Any] = orjson.loads) -> dict[str, Any]:
    """The same, whose depth is still to be checked."""
    try:
        body = loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the request body is not valid JSON in valid Unicode: {error}") from error
    if not isinstance(body, dict):
        raise RequestError(f"the request body is a JSON {type(body).__name__}, expected an object")
    return body


def check_depth(value: Any, within: int = 0) -> None:
    """Raise RequestError for a part of a body, `within` levels of it, that is nested too deep."""
    if too_deep(value, within):
        raise RequestError(f"the request body is nested more than {MAX_DEPTH} levels deep")


def too_deep(value: Any, within: int = 0) -> bool:
    """Whether JSON is nested deeper than we take it: orjson reads 1024 levels, but writes 254."""
    level = [value]
    for _ in range(MAX_DEPTH - within):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


def short(value: Any) -> str:
    """A value as messages quote it."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
