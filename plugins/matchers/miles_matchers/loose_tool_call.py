"""As `strict`, but arguments of tool calls may spell one JSON object differently.

Agents parse arguments and write them again: key order, white space, text or object change on the way. Ids, types,
names, the order of calls, unknown keys and reasoning still count.
"""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any, NoReturn

from miles_core.hookspecs import hookimpl
from miles_core.types import Message
from miles_matchers.strict import KEYS, same_keys


@hookimpl
def message_matches(stored: Message, replayed: Message) -> bool:
    """Equal in the four keys, arguments compared as JSON objects whose numbers have exact decimal values."""
    if same_keys(stored, replayed, KEYS):
        return True
    return same_keys(_canonical(stored), _canonical(replayed), KEYS)


def _canonical(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_canonical_call(call) for call in calls]}


def _canonical_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    return {**call, "function": {**function, "arguments": _canonical_arguments(function.get("arguments"))}}


def _canonical_arguments(arguments: Any) -> Any:
    """An object with exact numbers, or the value itself if it is not one: then only identical values match."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, dict):
        return _exact(arguments)
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(
            arguments,
            parse_int=Decimal,
            parse_float=Decimal,
            parse_constant=_not_json,
            object_pairs_hook=_without_duplicates,
        )
    except (ValueError, ArithmeticError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _exact(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return Decimal(repr(value))
    if isinstance(value, dict):
        return {key: _exact(inner) for key, inner in value.items()}
    return [_exact(inner) for inner in value] if isinstance(value, list) else value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("duplicate keys")
    return found


def _not_json(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
