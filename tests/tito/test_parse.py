"""Reading generations: any split gives the same message, and what is not a call stays text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.chat_tokenizer import END_OF_TEXT, IM_END, chat_family, encode

FAMILY = chat_family()
Message = dict[str, Any]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def said(message: Message) -> tuple[str, str, list[tuple[str, str]]]:
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]
    return message.get("reasoning_content", ""), message["content"], calls


def added_up(deltas: list[Message]) -> tuple[str, str, list[tuple[str, str]]]:
    """What deltas concatenate to; each call comes once, with its index in order."""
    reasoning = "".join(d.get("reasoning_content", "") for d in deltas)
    content = "".join(d.get("content", "") for d in deltas)
    calls = [c for d in deltas for c in d.get("tool_calls", [])]
    assert [c["index"] for c in calls] == list(range(len(calls)))
    return reasoning, content, [(c["function"]["name"], c["function"]["arguments"]) for c in calls]


THINK = "<think>\nHm.\n</think>\n\n"
GENERATIONS = {
    "plain": ("Hello.", ("", "Hello.", [])),
    "reasoning": (THINK + "Hello.", ("Hm.", "Hello.", [])),
    "empty reasoning": ("<think>\n\n</think>\n\nHello.", ("", "Hello.", [])),
    "lines of reasoning": ("<think>\na\n\nb\n</think>\n\nc", ("a\n\nb", "c", [])),
    "reasoning not closed": ("<think>\nHm", ("Hm", "", [])),
    "reasoning only": ("<think>\nHm\n</think>\n\n", ("Hm", "", [])),
    "one call": (THINK + call("f", '{"a": 1}'), ("Hm.", "", [("f", '{"a": 1}')])),
    "text and call": (THINK + "Look:\n" + call("f", "{}"), ("Hm.", "Look:", [("f", "{}")])),
    "two calls": (
        THINK + call("f", "{}") + "\n" + call("g", '{"é": "🌊"}'),
        ("Hm.", "", [("f", "{}"), ("g", '{"é": "🌊"}')]),
    ),
    "spelling of arguments": (call("f", '{ "b":1,  "a" : 2.50 }'), ("", "", [("f", '{ "b":1,  "a" : 2.50 }')])),
    "call in reasoning": ("<think>\n" + call("f", "{}") + "\n</think>\n\nx", (call("f", "{}"), "x", [])),
    "unicode": ("🌊🐋 — «merci» 東京", ("", "🌊🐋 — «merci» 東京", [])),
    "replacement character": ("a \ufffd b", ("", "a \ufffd b", [])),
    "white space": (THINK + "  x \n\n", ("Hm.", "  x \n\n", [])),
    "less-than signs": ("a < b <tool <think x", ("", "a < b <tool <think x", [])),
    "nothing": ("", ("", "", [])),
}


@pytest.mark.parametrize(("text", "expected"), GENERATIONS.values(), ids=GENERATIONS.keys())
@pytest.mark.parametrize("end", [[IM_END], [END_OF_TEXT], []], ids=["im_end", "endoftext", "cut"])
def test_a_generation(text: str, expected: Any, end: list[int]) -> None:
    ids = [*encode(text), *end]
    assert said(FAMILY.parse(ids)) == expected
    # one id at a time
    parser = FAMILY.parser()
    deltas = [delta for i in ids for delta in parser.feed([i])] + parser.finish()
    assert added_up(deltas) == expected
    assert said(parser.message()) == expected
    # and at every split
    for at in range(len(ids) + 1):
        parser = FAMILY.parser()
        deltas = [*parser.feed(ids[:at]), *parser.feed(ids[at:]), *parser.finish()]
        assert added_up(deltas) == expected, at


MALFORMED = {
    "cut off": '<tool_call>\n{"name": "w", "arguments": {"city": "Par',
    "not json": "<tool_call>\nnope\n</tool_call>",
    "no name": '<tool_call>\n{"arguments": {}}\n</tool_call>',
    "name empty": '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>',
    "name number": '<tool_call>\n{"name": 1, "arguments": {}}\n</tool_call>',
    "arguments list": call("f", "[1]"),
    "arguments number": call("f", "42"),
    "arguments null": call("f", "null"),
    "NaN": call("f", '{"a": NaN}'),
    "infinity": call("f", '{"a": -Infinity}'),
    "list": "<tool_call>\n[]\n</tool_call>",
    "empty": "<tool_call></tool_call>",
    "trailing": '<tool_call>\n{"name": "f", "arguments": {}} x\n</tool_call>',
    "deep": call("f", '{"a":' * 3000 + "1" + "}" * 3000),
    "deep list": call("f", '{"a":' + "[" * 3000 + "]" * 3000 + "}"),
    "long number": call("f", '{"a": ' + "9" * 5000 + "}"),
    "lone surrogate": call("f", '{"a": "\\ud83d"}').replace("{}", ""),
    "only opened": "<tool_call>",
}


@pytest.mark.parametrize("name", [n for n in MALFORMED if n not in ("lone surrogate", "long number")])
def test_what_is_not_a_call_stays_text(name: str) -> None:
    text = MALFORMED[name]
    parser = FAMILY.parser()
    parser.feed([*encode(text), IM_END])
    parser.finish()
    message = parser.message()
    assert message == {"role": "assistant", "content": text}
    assert len(parser.faults) == 1
    assert ("cut off" if name in ("cut off", "only opened") else "malformed") in parser.faults[0]


@pytest.mark.parametrize("name", ["lone surrogate", "long number"])
def test_doubtful_calls_never_fail(name: str) -> None:
    text = MALFORMED[name]
    message = FAMILY.parse([*encode(text), IM_END])
    calls = message.get("tool_calls")
    assert (message["content"] == text) is (calls is None)
    json.dumps(message).encode("utf-8")


def test_a_good_call_after_a_bad_one() -> None:
    text = "<tool_call>\nbad\n</tool_call>\n" + call("f", "{}")
    assert said(FAMILY.parse(encode(text))) == ("", "<tool_call>\nbad\n</tool_call>", [("f", "{}")])


def test_arguments_given_as_text() -> None:
    assert said(FAMILY.parse(encode(call("f", '"{\\"a\\": 1}"')))) == ("", "", [("f", '{"a": 1}')])


def test_a_call_without_arguments() -> None:
    assert said(FAMILY.parse(encode('<tool_call>{"name": "f"}</tool_call>'))) == ("", "", [("f", "{}")])


def test_calls_and_reasoning_can_be_left_as_text() -> None:
    text = THINK + call("f", "{}")
    assert said(FAMILY.parse(encode(text), calls=False)) == ("Hm.", call("f", "{}"), [])
    reasoning, content, calls = said(FAMILY.parse(encode(text), reasoning=False))
    assert (reasoning, calls) == ("", [("f", "{}")])
    assert content.rstrip("\n") == "<think>\nHm.\n</think>"


TAGS = [i for text in ("<think>", "</think>", "<tool_call>", "</tool_call>") for i in encode(text)]
IDS = st.lists(
    st.sampled_from([*TAGS, IM_END, END_OF_TEXT, *encode('\n{"name": "f", "arguments": {}}')])
    | st.sampled_from([i for char in "é東🌊\ufffd" for i in encode(char)])
    | st.integers(0, 255)
    | st.integers(0, 151_935),
    max_size=25,
)


@settings(max_examples=80, deadline=None)
@given(IDS, st.data())
def test_any_ids_parse_and_every_split_agrees(ids: list[int], data: st.DataObject) -> None:
    whole = FAMILY.parse(ids)
    assert isinstance(whole["content"], str)
    at = data.draw(st.integers(0, len(ids)))
    parser = FAMILY.parser()
    deltas = [*parser.feed(ids[:at]), *parser.feed(ids[at:]), *parser.finish()]
    assert parser.message() == whole
    assert added_up(deltas) == said(whole)
    one = FAMILY.parser()
    for i in ids:
        one.feed([i])
    one.finish()
    assert one.message() == whole
