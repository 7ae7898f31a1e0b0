"""Two messages are the same when role, content, reasoning and tool calls are equal as JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miles_core.hookspecs import hookimpl
from miles_core.types import Message

KEYS = ("role", "content", "reasoning_content", "tool_calls")


@hookimpl
def message_matches(stored: Message, replayed: Message) -> bool:
    """Equal in the four keys; missing, null, `""` and `[]` are one value, a call's `index` does not count."""
    return same_keys(stored, replayed, KEYS)


def same_keys(stored: Message, replayed: Message, keys: Sequence[str]) -> bool:
    """Whether two messages agree in some of their keys; shared by the built-in matchers."""
    return all(_same(_value(stored, key), _value(replayed, key)) for key in keys)


def _value(message: Message, key: str) -> Any:
    value = message.get(key)
    if value is None or value == "" or value == []:
        return None
    if key == "tool_calls" and isinstance(value, list):
        return [{k: v for k, v in c.items() if k != "index"} if isinstance(c, dict) else c for c in value]
    if key == "content" and isinstance(value, list):
        return _content_text(value)
    return value


def _content_text(parts: list[Any]) -> Any:
    """Text parts as one string, joined by one space; a list with anything else stays a list."""
    texts = [p.get("text") if isinstance(p, dict) and p.get("type") == "text" else None for p in parts]
    if all(isinstance(t, str) for t in texts):
        return " ".join(t for t in texts if t is not None) or None
    return parts


def _same(left: Any, right: Any) -> bool:
    """Equality of JSON values: 1 and 1.0 are one number, true is not 1."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(v, right[k]) for k, v in left.items())
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_same, left, right))
    return bool(left == right)
