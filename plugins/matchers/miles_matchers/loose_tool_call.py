"""As `strict`, but arguments of tool calls may spell one JSON object differently.

Agents parse arguments and write them again: key order, white space, text or object change on the way. Ids, types,
names, the order of calls, unknown keys and reasoning still count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable
from typing import Any, NoReturn

from miles_core.hookspecs import hookimpl
from miles_core.types import Message
from miles_matchers.strict import KEYS, key_of, same_keys

MAX_DEPTH = 128
"""Levels of nesting up to which arguments are read, as in requests; deeper ones match only themselves."""

_NUMBER = re.compile(r"(-?)(\d+)(?:\.(\d+))?(?:[eE]([+-]?\d+))?")


@hookimpl
def message_matches(stored: Message, replayed: Message) -> bool:
    """Equal in the four keys, arguments compared as JSON objects whose numbers have exact decimal values."""
    if same_keys(stored, replayed, KEYS):
        return True
    if not stored.get("tool_calls") or not replayed.get("tool_calls"):
        return False
    return same_keys(_with_arguments(stored, _meaning), _with_arguments(replayed, _meaning), KEYS)


@hookimpl
def message_key(message: Message) -> Hashable:
    """Equal for messages that match, and for those that differ in arguments alone."""
    return key_of(_with_arguments(message, lambda arguments: None), KEYS)


def _with_arguments(message: Message, change: Any) -> Message:
    """The message with the arguments of each of its calls changed."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_changed_call(call, change) for call in calls]}


def _changed_call(call: Any, change: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    return {**call, "function": {**function, "arguments": change(function.get("arguments"))}}


def _meaning(arguments: Any) -> Any:
    """An object with exact numbers, or the value itself if it is not one: then only identical values match."""
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, (str, dict)):
        return arguments
    try:
        value = _parsed(arguments) if isinstance(arguments, str) else arguments
        return _exact(value, MAX_DEPTH) if isinstance(value, dict) else arguments
    except (ValueError, RecursionError):
        return arguments


def _parsed(text: str) -> Any:
    return json.loads(
        text, parse_int=_Number, parse_float=_Number, parse_constant=_not_json, object_pairs_hook=_without_duplicates
    )


class _Number(str):
    """A number as it is written."""

    __slots__ = ()


def _exact(value: Any, depth: int) -> Any:
    """The value with numbers as their exact decimal values."""
    if depth < 0:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, _Number):
        return _decimal(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _decimal(repr(value))
    if isinstance(value, dict):
        return {key: _exact(inner, depth - 1) for key, inner in value.items()}
    return [_exact(inner, depth - 1) for inner in value] if isinstance(value, list) else value


def _decimal(text: str) -> tuple[str, str, int]:
    """Sign, digits without zeros at either end, and exponent: equal for equal numbers, however large the exponent."""
    found = _NUMBER.fullmatch(text)
    if found is None:
        raise ValueError(f"{text} is not a JSON number")
    sign, whole, fraction, exponent = found.groups(default="")
    digits = (whole + fraction).lstrip("0")
    significant = digits.rstrip("0")
    if not significant:
        return ("", "", 0)
    return (sign, significant, int(exponent or 0) - len(fraction) + len(digits) - len(significant))


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("duplicate keys")
    return found


def _not_json(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
