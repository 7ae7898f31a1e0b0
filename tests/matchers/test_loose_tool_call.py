"""The matcher `loose_tool_call`: arguments may spell one object differently, and nothing else may differ."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_matchers.loose_tool_call import message_key, message_matches
from miles_matchers.role_content_only import message_key as role_content_key
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
        ('{"a": 1e2}', '{"a": 100}'),
        ('{"a": 0.5}', '{"a": 5e-1}'),
        ('{"a": -0.0}', '{"a": 0}'),
        ('{"a": 1e999999999}', '{"a":10E+999999998}'),
        ('{"a": 1e-99999999999999999999}', '{"a":0.1e-99999999999999999998}'),
        ('{"a": ' + "9" * 5000 + "}", '{"a":' + "9" * 5000 + ".0}"),
        ({"a": 1e22}, '{"a": 10000000000000000000000}'),
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
        ('{"a": 1e999999999}', '{"a": 1e999999998}'),
        ('{"a": 1e' + "9" * 5000 + "}", '{"a":1e' + "9" * 5000 + "}"),
        ('{"a": {"b": 1, "b": 1}}', '{"a": {"b": 1}}'),
        ('{"a": 1}', '[["a", 1]]'),
        ('{"a": 1}', ["a"]),
        ('{"a": "1e2"}', '{"a": 1e2}'),
        ("{" + '"a":{' * 200 + "}" * 201, "{ " + '"a":{' * 200 + "}" * 201),
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


def nested(depth: int, space: str = "") -> str:
    return '{"a":' * depth + space + "1" + "}" * depth


@pytest.mark.parametrize("depth", [10, 128, 129, 500, 990, 5000, 200_000])
def test_deep_arguments_are_compared_as_they_are(depth: int) -> None:
    assert message_matches(calling(nested(depth)), calling(nested(depth))) is True
    assert message_matches(calling(nested(depth)), calling(nested(depth, " "))) is (depth <= 128)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(max_size=2), VALUES, max_size=3), st.randoms(use_true_random=False))
def test_an_object_is_itself_however_it_is_written(value: dict[str, Any], draw: random.Random) -> None:
    keys = draw.sample(list(value), len(value))
    texts = [
        json.dumps(
            {key: value[key] for key in keys}, indent=draw.choice((None, 0, 3)), ensure_ascii=draw.random() < 0.5
        )
        for _ in range(2)
    ]
    forms = [value, *texts]
    for left in forms:
        for right in forms:
            assert message_matches(calling(left), calling(right)) is True
            assert message_key(calling(left)) == message_key(calling(right))
    other = {**value, "new key": 1}
    assert not any(message_matches(calling(form), calling(json.dumps(other))) for form in forms)


def test_keys_leave_out_arguments_alone() -> None:
    assert message_key(calling("{}")) == message_key(calling('{"a": 1}'))
    assert message_key(calling("{}")) != message_key(calling("{}", id="c2"))
    assert role_content_key(calling("{}")) == role_content_key({"role": "assistant"})


def test_role_content_only_looks_at_nothing_else() -> None:
    assert role_content_matches(calling(STORED), {"role": "assistant", "content": None}) is True
    assert role_content_matches({"role": "user", "content": "a"}, {"role": "user", "content": "a "}) is False
    assert role_content_matches({"role": "user", "content": "a"}, {"role": "tool", "content": "a"}) is False
