"""Tool calls of every family: whole, cut off, damaged, quoted in a value, and beside each other."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.turns import ELEMENTS, FAMILIES, Call, Read, block, byte_family, read, strings, tool, written

every_family = pytest.mark.parametrize("name", FAMILIES)
every_element_family = pytest.mark.parametrize("name", ELEMENTS)

TOOLS = strings("f", "g", "h", "w")
F: Call = ("f", {"a": "q1"})
H: Call = ("h", {"b": "k9"})
PIECES = re.compile(
    r"<tool_call>|</tool_call>|<function=\w+>|</function>|</?parameter[^>]*>|</?arg_\w+>|</?minimax:tool_call>"
    r"|<invoke[^>]*>|</invoke>|</?｜DSML｜[^>]*>|<\|[a-z_]+\|>|[{}\":]|functions\.\w+:\d"
)
"""The parts that calls are made of, in any format."""


def tags(name: str) -> list[str]:
    """The tags of a family's calls, each once."""
    found = PIECES.findall(block(name, [("f", {"a": "x"}), ("g", {"b": 1})]))
    return [tag for tag in dict.fromkeys(found) if len(tag) > 1]


PLAIN = [
    "",
    " ",
    "\n",
    "\n\nx\n\n",
    "  x  ",
    "é 東京 🌊 \u200b\u00a0",
    "\\ \\n \\\" ' ` %s {{x}}",
    "null",
    "None",
    "True",
    "42",
    " 42 ",
    "-0",
    "1e5",
    "NaN",
    "[1]",
    '{"a": 1}',
    '"q"',
    "a < b > c </ & &amp;",
    "</",
    "<tool_cal",
]


@every_family
def test_string_values_are_read_as_written(name: str) -> None:
    values = [*PLAIN, *tags(name), *(f"a {tag} b" for tag in tags(name))]
    for at in range(0, len(values), 8):
        calls: list[Call] = [("w", {"a": value, "b": "next"}) for value in values[at : at + 8]]
        found = read(name, written(name, calls, "Look:"), TOOLS)
        assert (found.calls, found.content, found.reasoning, found.faults) == (calls, "Look:", "Hm.", [])


@every_family
@pytest.mark.parametrize("around", ["{}", "Such as:\n{}\nor so.", "{}{}"])
def test_a_value_may_quote_calls(name: str, around: str) -> None:
    for quoted in (block(name, [("g", {"a": "1", "b": "2"})]), block(name, [("g", {})]), block(name, [F, H])):
        value = around.replace("{}", quoted)
        calls: list[Call] = [F, ("w", {"a": value}), ("w", {"a": value, "b": "z"}), H]
        found = read(name, written(name, calls, "Look:"), TOOLS)
        assert (found.calls, found.content, found.faults) == (calls, "Look:", [])


@every_family
def test_a_value_may_hold_many_ends_of_calls(name: str) -> None:
    for tag in [tag for tag in tags(name) if tag.startswith("</") or "end" in tag]:
        calls: list[Call] = [("w", {"a": f" {tag} ." * 150}), H]
        assert read(name, written(name, calls), TOOLS).calls == calls


TYPED: list[tuple[Any, Any]] = [
    ({"type": "integer"}, 42),
    ({"type": "number"}, -2.5e-7),
    ({"type": "boolean"}, True),
    ({"type": ["boolean", "null"]}, None),
    ({"type": ["string", "null"]}, None),
    ({"type": ["string", "integer"]}, 7),
    ({"anyOf": [{"type": "array"}, {"type": "null"}]}, [1, [True, None], {"b": " é "}]),
    ({"type": "object"}, {"x": {"y": ["</parameter>", "</arg_value>", "</｜DSML｜parameter>", "a\nb"]}}),
    ({"type": "array"}, ["</parameter>\n<parameter=b>\n", '</parameter>\n<parameter name="b">', '"', "\\"]),
    ({}, {"nested": [1.5, False]}),
    (True, 10**20),
    ({"const": 5}, 5),
    ({"enum": ["5", "x"]}, "5"),
]


@every_family
def test_values_of_every_type(name: str) -> None:
    tools = [tool(f"t{n}", a=schema, b={"type": "string"}) for n, (schema, _) in enumerate(TYPED)]
    calls: list[Call] = [(f"t{n}", {"a": value, "b": "z"}) for n, (_, value) in enumerate(TYPED)]
    found = read(name, written(name, calls), tools)
    assert (repr(found.calls), found.faults) == (repr(calls), [])  # in which True is not 1


@every_family
def test_odd_names_of_parameters(name: str) -> None:
    names = ("a b", "x-y", "é", "a>b", 'q"q', "a.b[0]", "")
    calls: list[Call] = [("ns.f-1", {key: f"value {n}" for n, key in enumerate(names)})]
    assert read(name, written(name, calls)).calls == calls


@every_family
def test_a_damaged_call_is_text_and_the_others_are_calls(name: str) -> None:
    for damaged in (("g", {"a": "v1"}), ("g", {})):
        text = written(name, [F, damaged, H], "Look:")
        assert read(name, text, TOOLS).calls == [F, damaged, H]
        first, last = text.index("q1"), text.index("k9")
        own = [at for at in PIECES.finditer(text) if first < at.start() < last]
        for piece in own:
            found = read(name, text[: piece.start()] + text[piece.end() :], TOOLS)
            context = (piece[0], text, found.calls, found.content)
            assert all(call in (F, damaged, H) for call in found.calls), context
            assert F in found.calls or H in found.calls, context  # the piece may be one of theirs
            assert found.faults or len(found.calls) == 3, context  # Inkling can do without a block's marker
            for call in (F, damaged, H):
                shown = found.content + repr(found.calls)
                assert all(value in shown for value in call[1].values()), context


@every_family
def test_cut_off_at_every_token(name: str) -> None:
    calls: list[Call] = [("f", {"a": "é <b>\n", "b": "2"}), ("g", {}), ("h", {"a": "x"})]
    family = byte_family(name)
    ids = family.encode(written(name, calls, "Look: 東", "So."))
    for at in range(len(ids) + 1):
        found = Read(name, ids[:at], TOOLS)
        assert found.calls == calls[: len(found.calls)]
        seen = family.tokenizer.decode(ids[:at])
        for tag in ("</think>", "<think>", *(block(name, [call]) for call in calls)):
            seen = seen.replace(tag.strip(), "")
        if not found.calls and name != "inkling":  # whose blocks are no text
            assert "".join(seen.split()) == "".join((found.reasoning + found.content).split())
        inside = "{" in found.content or "<" in found.content.removesuffix("<")
        assert bool(found.faults) or not inside or len(found.content) < 40


@every_family
@pytest.mark.parametrize("end", ["", "\n"])
def test_whole_calls_after_one_that_was_given_up(name: str, end: str) -> None:
    begun = block(name, [("w", {"a": "abc", "b": "def"})])
    for cut in ("abc", "def", "w"):
        text = "</think>Look:" + begun[: begun.index(cut) + len(cut)] + "\n" + block(name, [F, H]).lstrip() + end
        if name == "inkling":
            text = text.replace("</think>", "<|content_text|>")
        found = read(name, text, TOOLS)
        assert found.calls == [F, H] or name == "inkling"  # where no closing token came, all is one body
        assert "Look:" in found.content
        assert cut in found.content
        assert found.faults


@every_family
def test_text_before_between_and_after_calls_stays(name: str) -> None:
    one, two = block(name, [F]), block(name, [H])
    if name == "inkling":
        one = f"<|end_message|>{one.removeprefix('<|end_message|>')}<|message_model|><|content_text|>"
        text = f"<|content_text|> before\n\t{one} between\n\n {one} \n after \n<|end_message|>"
        calls = [F, F]
    else:
        opening = "" if name == "qwen3" else "</think>"
        text, calls = f"{opening} before\n\t{one} between\n\n {two} \n after \n", [F, H]
    found = read(name, text, TOOLS)
    assert found.calls == calls
    assert found.content == " before\n\t between\n\n  \n after \n"


@every_family
@pytest.mark.parametrize(
    "reasoning", ["I call it.", "It is <tool_call>, or so, or <|tool_calls_section_begin|>.\nNow:"]
)
def test_reasoning_that_is_never_closed_ends_where_only_calls_follow(name: str, reasoning: str) -> None:
    opened = "<think>\n" if name == "qwen3" else ""
    if name == "inkling":
        return
    found = read(name, opened + reasoning + block(name, [F, H]), TOOLS)
    assert (found.reasoning, found.content, found.calls) == (reasoning, "", [F, H])
    text = opened + reasoning + block(name, [F, H])
    for cut in range(text.rindex("h"), text.index("k9") + 2):
        found = read(name, text[:cut], TOOLS)
        assert (found.reasoning, found.calls) == (reasoning, [F])
        assert found.faults
        assert found.content.endswith(text[cut - 1])
    found = read(name, opened + reasoning + block(name, [F, H]) + "\nNo, that is not it", TOOLS)
    assert (found.content, found.calls) == ("", [])
    found = read(name, opened + reasoning + block(name, [F, H]) + "</think>Done.", TOOLS)
    assert (found.content.strip(), found.calls) == ("Done.", [])


MINIMAX = "minimax_m25"


def test_text_in_a_block_of_calls_is_shown() -> None:
    good = '<invoke name="f">\n<parameter name="a">q1</parameter>\n</invoke>'
    last = '<invoke name="h">\n<parameter name="b">k9</parameter>\n</invoke>'
    text = f"</think>C\n<minimax:tool_call>\n{good}\nwell\n{last}\n</minimax:tool_call>"
    found = read(MINIMAX, text, TOOLS)
    assert (found.calls, found.content) == ([F, H], "C\nwell\n")
    assert found.faults == ["a tool call is malformed (text stands where a call is due): '\\nwell\\n'"]
    broken = good.replace("</parameter>", "")
    found = read(MINIMAX, f"</think>C\n<minimax:tool_call>\n{broken}\n{last}\n</minimax:tool_call>.", TOOLS)
    assert found.calls == [H]
    assert found.content == f"C\n<minimax:tool_call>\n{broken}\n\n</minimax:tool_call>."
    found = read(MINIMAX, "</think>C\n<minimax:tool_call>\n</minimax:tool_call>", TOOLS)
    assert (found.calls, found.content) == ([], "C\n<minimax:tool_call>\n</minimax:tool_call>")
    assert "its block is empty" in found.faults[0]


@every_element_family
def test_a_parameter_given_twice_or_not_closed_is_no_call(name: str) -> None:
    text = written(name, [("g", {"a": "v1", "b": "v2"})], "Look:")
    pieces = [at for at in PIECES.finditer(text, text.index("v1")) if at.start() < text.index("v2")]
    assert read(name, text[: pieces[0].start()] + text[pieces[0].end() :], TOOLS).calls == []
    start, end = text.rindex("b", 0, text.index("v2")), text.index("v2")
    assert read(name, text[:start] + "a" + text[start + 1 : end] + text[end:], TOOLS).calls == []


def test_ids_of_kimi_are_kept_as_sampled() -> None:
    ids = ["functions.f:0", "functions.ns.f-1:12", "f", " functions.f:3 ", "functions.f"]
    section = "".join(f"<|tool_call_begin|>{i}<|tool_call_argument_begin|>{{}}<|tool_call_end|>" for i in ids)
    found = read("kimi26", f"</think><|tool_calls_section_begin|>{section}<|tool_calls_section_end|>")
    assert [call["id"] for call in found.message["tool_calls"]] == ids
    assert [name for name, _ in found.calls] == ["f", "ns.f-1", "f", "f", "f"]


def test_a_self_closing_call_of_deepseek() -> None:
    invokes = '<｜DSML｜invoke name="f"/>\n<｜DSML｜invoke name="g" />'
    found = read("deepseekv4", f"</think>C\n\n<｜DSML｜tool_calls>\n{invokes}\n</｜DSML｜tool_calls>")
    assert (found.calls, found.content, found.faults) == ([("f", {}), ("g", {})], "C", [])


NO_JSON_CALLS = {
    "another member": '{"name": "f", "parameters": {"a": 1}}',
    "a member twice": '{"name": "f", "arguments": {"a": 1}, "arguments": {}}',
    "arguments that are text": '{"name": "f", "arguments": "a"}',
    "arguments that are a list in a string": '{"name": "f", "arguments": "[1]"}',
    "two calls": '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]',
    "a line break in a string": '{"name": "f", "arguments": {"a": "x\ny"}}',
    "single quotes": "{'name': 'f', 'arguments': {}}",
}


@pytest.mark.parametrize("inside", NO_JSON_CALLS.values(), ids=NO_JSON_CALLS.keys())
def test_json_that_is_no_call(inside: str) -> None:
    text = f"<tool_call>\n{inside}\n</tool_call>"
    found = read("qwennext", f"</think>\n\n{text}{block('qwennext', [F])}", TOOLS)
    assert (found.content, found.calls) == (text, [F])
    assert "malformed" in found.faults[0]


SOUP = ["<think>", "</think>", "\n", " ", "x", "é", '"', "{", "}", ":", "/>", "f", "a", "<|im_end|>", "[e~["]


@every_family
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_damaged_generations_are_read_alike_however_they_are_split(name: str, data: st.DataObject) -> None:
    family = byte_family(name)
    values = st.lists(st.sampled_from([*SOUP, *tags(name)]), max_size=4).map("".join)
    calls = data.draw(
        st.lists(st.tuples(st.sampled_from("fgh"), st.dictionaries(st.sampled_from("ab"), values)), max_size=2)
    )
    ids = family.encode(written(name, calls, data.draw(values), "R"))
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(ids)))
        change = data.draw(st.integers(0, 3))
        if change == 0:
            del ids[at : at + data.draw(st.integers(1, 12))]
        elif change == 1:
            ids[at:at] = family.encode(data.draw(st.sampled_from([*SOUP, *tags(name)])))
        elif change == 2:
            ids[at:at] = ids[at : at + 9]
        else:
            ids.insert(at, data.draw(st.integers(0, family.tokenizer.vocab_size + 99)))
    found = Read(name, ids, TOOLS)  # in which three splits are compared
    if not found.calls and name != "inkling":
        text = family.tokenizer.decode([i for i in ids if i not in family.hidden_ids])
        shown = found.reasoning + found.content
        assert _bare(text) == _bare(shown)


def _bare(text: str) -> str:
    return "".join(text.replace("<think>", "").replace("</think>", "").split())
