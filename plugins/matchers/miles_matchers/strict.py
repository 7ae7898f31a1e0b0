"""Two messages are the same when role, content, reasoning and tool calls are equal as JSON values."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from miles_core.hookspecs import hookimpl
from miles_core.types import Message

KEYS = ("role", "content", "reasoning_content", "tool_calls")
TEXT_PARTS = ("text", "input_text", None)
"""Types of content parts that are text; a part may also be the text itself."""


@hookimpl
def message_matches(stored: Message, replayed: Message) -> bool:
    """Equal in the four keys; missing, null, `""` and `[]` are one value.

    A call's `index` does not count, nor what the helpers of the `openai` client put beside a call's arguments
    (`parsed_arguments`).
    """
    return same_keys(stored, replayed, KEYS)


@hookimpl
def message_key(message: Message) -> Hashable:
    """Equal for messages that match, and for no others."""
    return key_of(message, KEYS)


def same_keys(stored: Message, replayed: Message, keys: Sequence[str]) -> bool:
    """Whether two messages agree in some of their keys; shared by the built-in matchers."""
    for key in keys:
        left, right = stored.get(key), replayed.get(key)
        if type(left) is str and type(right) is str:
            if left != right:
                return False
        elif left is not right and not _same(_value(key, left), _value(key, right)):
            return False
    return True


def key_of(message: Message, keys: Sequence[str]) -> Hashable:
    """What agrees where `same_keys` does; shared by the built-in matchers."""
    found: list[Hashable] = []
    for key in keys:
        value = message.get(key)
        if type(value) is str or value is None:  # most are
            found.append(value or None)
        else:
            found.append(frozen(_value(key, value)))
    return tuple(found)


def frozen(value: Any) -> Hashable:
    """A JSON value as one that can be looked up; equal where the values are, so true is not 1."""
    if isinstance(value, dict):
        return ("object", frozenset([(key, frozen(inner)) for key, inner in value.items()]))
    if isinstance(value, list):
        return ("list", *map(frozen, value))
    return ("boolean", value) if isinstance(value, bool) else value


def _value(key: str, value: Any) -> Any:
    if type(value) is str:
        return value or None
    if value is None or value == []:
        return None
    if key == "tool_calls" and isinstance(value, list):
        return [_call(call) for call in value]
    if key == "content" and isinstance(value, list):
        return _content_text(value)
    return value


def _call(call: Any) -> Any:
    """A tool call without what clients add to it."""
    if not isinstance(call, dict):
        return call
    function = call.get("function")
    if isinstance(function, dict) and "parsed_arguments" in function:
        call = {**call, "function": {k: v for k, v in function.items() if k != "parsed_arguments"}}
    return {k: v for k, v in call.items() if k != "index"}


def _content_text(parts: list[Any]) -> Any:
    """Text parts as one string, joined by one space; a list with anything else stays a list."""
    texts = [_part_text(part) for part in parts]
    return parts if None in texts else " ".join(map(str, texts)) or None


def _part_text(part: Any) -> str | None:
    text = part.get("text") if isinstance(part, dict) and part.get("type") in TEXT_PARTS else part
    return text if isinstance(text, str) else None


def _same(left: Any, right: Any) -> bool:
    """Equality of JSON values: 1 and 1.0 are one number, true is not 1."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(v, right[k]) for k, v in left.items())
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_same, left, right))
    return bool(left == right)
