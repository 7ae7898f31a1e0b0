"""The matcher `loose_tool_call`: arguments may spell one object differently, and nothing else may differ."""

from __future__ import annotations

from typing import Any

import pytest

from miles_matchers.loose_tool_call import message_matches
from miles_matchers.role_content_only import message_matches as role_content_matches

STORED = '{"a":1,"b":{"x":2,"y":3}}'


def calling(arguments: Any, **keys: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}, **keys}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


@pytest.mark.parametrize(
    ("stored", "replayed"),
    [
        (STORED, '{ "b": {"y": 3, "x": 2}, "a": 1 }'),
        (STORED, {"b": {"y": 3, "x": 2}, "a": 1}),
        (STORED, '{"a": 1.0, "b": {"x": 2e0, "y": 3}}'),
        ("{}", ""),
        ("{}", None),
        ({}, "{ }"),
        ('{"a": 0.1}', {"a": 0.1}),
        ("[1]", "[1]"),
        ('{"a": NaN}', '{"a": NaN}'),
    ],
)
def test_one_object_in_two_spellings_is_the_same(stored: Any, replayed: Any) -> None:
    assert message_matches(calling(stored), calling(replayed)) is True
    assert message_matches(calling(replayed), calling(stored)) is True


@pytest.mark.parametrize(
    ("stored", "replayed"),
    [
        ('{"a": 1}', '{"a": true}'),
        ('{"a": 1}', '{"a": "1"}'),
        ('{"a": 1}', '{"a": 2}'),
        ('{"a": [1, 2]}', '{"a": [2, 1]}'),
        ('{"a": 1, "a": 1}', '{"a": 1}'),
        ('{"a": NaN}', '{"a":NaN}'),
        ("[1]", "[ 1 ]"),
        ('{"a": 9007199254740993}', '{"a": 9007199254740992}'),
        ('{"a": 0.1}', '{"a": 0.10000000000000001}'),
        ("{bad", "{ bad"),
        ("{}", "null"),
    ],
)
def test_other_values_are_not(stored: Any, replayed: Any) -> None:
    assert message_matches(calling(stored), calling(replayed)) is False


@pytest.mark.parametrize("change", [{"id": "c2"}, {"type": "other"}, {"extra": 1}])
def test_the_rest_of_a_call_counts(change: dict[str, Any]) -> None:
    assert message_matches(calling("{}"), calling("{}", **change)) is False


def test_the_order_of_calls_reasoning_and_content_count() -> None:
    first, second = calling('{"a": 1}')["tool_calls"], calling('{"a": 2}')["tool_calls"]
    both = {"role": "assistant", "content": "", "tool_calls": first + second}
    assert message_matches(both, {**both, "tool_calls": second + first}) is False
    assert message_matches(both, {**both, "reasoning_content": "r"}) is False
    assert message_matches(both, {**both, "content": "c"}) is False
    assert message_matches(both, {**both, "reasoning_content": None, "content": None}) is True


def test_role_content_only_looks_at_nothing_else() -> None:
    assert role_content_matches(calling(STORED), {"role": "assistant", "content": None}) is True
    assert role_content_matches({"role": "user", "content": "a"}, {"role": "user", "content": "a "}) is False
    assert role_content_matches({"role": "user", "content": "a"}, {"role": "tool", "content": "a"}) is False
