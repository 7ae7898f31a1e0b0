"""The strict matcher's idea of the same message."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_matchers.strict import message_key, message_matches


def call(arguments: Any = "{}", **keys: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}, **keys}


BASE = {"role": "assistant", "content": "x", "reasoning_content": "r", "tool_calls": [call()]}


def test_itself() -> None:
    assert message_matches(BASE, dict(BASE)) is True


@pytest.mark.parametrize("key", ["content", "reasoning_content", "tool_calls"])
@pytest.mark.parametrize("left", [None, "", [], "missing"])
@pytest.mark.parametrize("right", [None, "", [], "missing"])
def test_empty_values_are_one(key: str, left: Any, right: Any) -> None:
    rest = {k: v for k, v in BASE.items() if k != key}
    messages = [rest if value == "missing" else {**rest, key: value} for value in (left, right)]
    assert message_matches(*messages) is True
    assert message_matches(messages[0], BASE) is False


@pytest.mark.parametrize(
    "other",
    [
        {"role": "user"},
        {"content": "x "},
        {"content": " x"},
        {"content": "X"},
        {"reasoning_content": None},
        {"reasoning_content": "r\n"},
        {"tool_calls": None},
        {"tool_calls": [call(), call()]},
        {"tool_calls": [call("{ }")]},
        {"tool_calls": [call({})]},
        {"tool_calls": [call(id="2")]},
        {"tool_calls": [call(type="x")]},
        {"tool_calls": [call(extra=None)]},
        {"tool_calls": {}},
    ],
)
def test_a_difference_counts(other: dict[str, Any]) -> None:
    assert message_matches(BASE, {**BASE, **other}) is False
    assert message_matches({**BASE, **other}, BASE) is False


@pytest.mark.parametrize("other", [{"name": "bob"}, {"tool_call_id": "7"}, {"refusal": None}, {"audio": {"id": 1}}])
def test_other_keys_do_not_count(other: dict[str, Any]) -> None:
    assert message_matches(BASE, {**BASE, **other}) is True


def test_a_calls_index_does_not_count() -> None:
    assert message_matches(BASE, {**BASE, "tool_calls": [call(index=3)]}) is True


@pytest.mark.parametrize("parsed", [None, {}, {"a": 1}])
def test_what_the_openai_client_parses_does_not_count(parsed: Any) -> None:
    function = {"name": "f", "arguments": "{}", "parsed_arguments": parsed}
    assert message_matches(BASE, {**BASE, "tool_calls": [{**call(), "function": function}]}) is True


@pytest.mark.parametrize(("left", "right"), [(1, True), (0, False), (1, "1"), (None, 0), (None, False), (None, {})])
def test_kinds_of_values_are_told_apart(left: Any, right: Any) -> None:
    for a, b in ((left, right), (right, left)):
        assert message_matches({"role": "user", "content": a}, {"role": "user", "content": b}) is False
        deep = [{**BASE, "tool_calls": [call(value)]} for value in ({"k": [a]}, {"k": [b]})]
        assert message_matches(*deep) is False
        assert message_key(deep[0]) != message_key(deep[1])


def test_one_and_one_point_zero_are_one_number() -> None:
    assert message_matches({**BASE, "tool_calls": [call({"a": 1})]}, {**BASE, "tool_calls": [call({"a": 1.0})]}) is True


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([{"type": "text", "text": "a"}], "a"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a b"),
        ([{"type": "text", "text": ""}], ""),
        ([{"type": "text", "text": ""}], None),
        (["a", {"text": "b"}], "a b"),
        ([{"type": "input_text", "text": "a"}], "a"),
    ],
)
def test_text_parts_are_their_text(parts: Any, text: Any) -> None:
    assert message_matches({"role": "tool", "content": text}, {"role": "tool", "content": parts}) is True
    assert message_matches({"role": "tool", "content": parts}, {"role": "tool", "content": text}) is True


def test_parts_that_are_not_text_are_compared_as_they_are() -> None:
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    assert message_matches({"role": "user", "content": image}, {"role": "user", "content": list(image)}) is True
    assert message_matches({"role": "user", "content": image}, {"role": "user", "content": ""}) is False


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.fixed_dictionaries(
    {"role": JSON}, optional={"content": JSON, "reasoning_content": JSON, "tool_calls": JSON}
)


@settings(max_examples=50, deadline=None)
@given(MESSAGES, MESSAGES)
def test_a_decision_on_any_json_is_a_bool_and_symmetric(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert message_matches(left, left) is True
    decision = message_matches(left, right)
    assert isinstance(decision, bool)
    assert message_matches(right, left) is decision
    assert (message_key(left) == message_key(right)) is decision
    assert (hash(message_key(left)) == hash(message_key(right))) or not decision
