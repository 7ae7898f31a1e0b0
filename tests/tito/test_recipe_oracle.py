"""`deepseekv4@recipe` against DeepSeek's own renderer, the package `deepseek-recipe`, text for text.

The departures that keep turns append-only are what `as_declared` says of a conversation; nothing else may differ.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import deepseek_recipe as recipe
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.golden import golden_family, golden_rows

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None

FAMILY = golden_family("deepseekv4@recipe")
ENCODING = recipe.DeepseekV4Encoding()
ROLES = {"system", "user", "assistant", "tool", "latest_reminder"}
DUMMY_TOOL: Tools = [{"type": "function", "function": {"name": "dummy"}}]

often = settings(max_examples=500, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


# -- the package -----------------------------------------------------------------------------------------------------


def package_message(message: Message) -> Any:
    content = message["content"] or ""
    match message["role"]:
        case "system":
            return recipe.SystemMessage(content)
        case "user":
            return recipe.UserMessage(content)
        case "latest_reminder":
            return recipe.LatestReminderMessage(content)
        case "tool":
            return recipe.ToolMessage(content, message.get("tool_call_id"))
    calls = [
        recipe.ToolCall(call.get("id") or "", call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or []
    ]
    return recipe.AssistantMessage(content, message.get("reasoning_content"), calls or None)


def package(messages: list[Message], tools: Tools, thinking: bool, effort: str | None) -> str:
    """What the package writes, given a conversation as its own types."""
    functions = [tool.get("function", tool) for tool in tools or []]
    conversation = recipe.Conversation(
        [package_message(message) for message in messages],
        thinking_mode=thinking,
        tools=[recipe.ToolDefinition(f["name"], f.get("description"), f.get("parameters")) for f in functions] or None,
        reasoning_effort=effort,
    )
    return str(ENCODING.render_conversation(conversation).prompt)


def ours(messages: list[Message], tools: Tools, thinking: bool, effort: str | None) -> str:
    kwargs = {"thinking": thinking, **({"reasoning_effort": effort} if effort else {})}
    return FAMILY.render(messages, tools, FAMILY.merge_kwargs(kwargs))


# -- the departures --------------------------------------------------------------------------------------------------


def as_declared(messages: list[Message], tools: Tools, thinking: bool, effort: str | None) -> str:
    """The package's text with what our encoder departs in, each made by asking the package differently."""
    keeps_reasoning = thinking and not tools and any(m.get("reasoning_content") for m in messages)
    asked = [without_empty_reasoning(m) if keeps_reasoning else m for m in in_order_of_calls(messages)]
    if not keeps_reasoning:
        return package(asked, tools, thinking, effort)
    # The package drops reasoning where there are no tools: ask with one, then take its block out again.
    block = package([], DUMMY_TOOL, thinking, effort).removeprefix(package([], None, thinking, effort)[: -len(OPENER)])
    whole = package(asked, DUMMY_TOOL, thinking, effort)
    assert whole.count(block.removesuffix(OPENER)) == 1
    return whole.replace(block.removesuffix(OPENER), "")


OPENER = "<｜Assistant｜><think>"


def without_empty_reasoning(message: Message) -> Message:
    return message if message.get("reasoning_content") else {**message, "reasoning_content": None}


def in_order_of_calls(messages: list[Message]) -> list[Message]:
    """Ids that ascend as the calls stand: the package sorts calls by their ids, which were sampled in their order."""
    names: dict[str, str] = {}
    out = copy.deepcopy(messages)
    for message in out:
        for call in message.get("tool_calls") or []:
            names[call["id"]] = f"id{len(names):04}"
            call["id"] = names[call["id"]]
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message["tool_call_id"] = names[message["tool_call_id"]]
    return out


def sorts_across_a_turn(messages: list[Message]) -> bool:
    """Whether the package would put an assistant turn in order with results, which moves what was sampled."""
    rest: list[Message] = []
    for message in messages:
        in_a_row = rest and message["role"] == rest[-1]["role"] == "user"
        if message["role"] != "system" and not in_a_row:
            rest.append(message)
    windows = [
        (rest[at : at + len(message["tool_calls"])], len(message["tool_calls"]))
        for at, message in enumerate(rest, 1)
        if message.get("tool_calls")
    ]
    return any(len(window) == calls and any(m["role"] == "assistant" for m in window) for window, calls in windows)


# -- conversations ---------------------------------------------------------------------------------------------------

texts = st.sampled_from(
    ["Hi.", "", "  sp \n\n", "naïve 数 🙂", "<think>x</think>", "</think>", "a\nb", "<｜User｜>", '{"a": 1}',
     "\x00\u2028\x7f", '"q" \\ /', "<tool_result>", "<｜end▁of▁sentence｜>"]
)  # fmt: skip
keys = st.sampled_from(["a", "b", "é", "x y", "<k>", '"', "z"])
integers = st.one_of(st.integers(-9, 9), st.sampled_from([10**12, 2**63 - 1, -(2**63), 2**64 - 1]))
"""Those that fit 64 bits; longer ones are `test_numbers_that_the_package_rounds`."""
values = st.recursive(
    st.one_of(texts, integers, st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(keys, inner, max_size=2)),
    max_leaves=6,
)
objects = st.dictionaries(keys, values, max_size=3)


@st.composite
def spelled(draw: st.DrawFn) -> str:
    separators = draw(st.sampled_from([None, (",", ":")]))
    return json.dumps(draw(objects), ensure_ascii=draw(st.booleans()), separators=separators)


odd_arguments = st.sampled_from(
    ["", " ", "{", "[1]", "null", "12", "true", '"s"', "NaN", '{"a": NaN}', '{"a": 1, "a": 2}', '{"a": 1e400}',
     "[1, 2.50]", '{"a": "\\ud800"}', '{"a": 1} x', '{"b": 1, "a": {"d": 1, "c": 2}}', '{"a": 1E5}', '"\\ud83d\\ude42"',
     '  {"a": 1}  ']
)  # fmt: skip
calls = st.lists(
    st.builds(
        lambda name, arguments: {"type": "function", "function": {"name": name, "arguments": arguments}},
        st.sampled_from(["f", "g h", "é", ""]),
        st.one_of(spelled(), odd_arguments),
    ),
    max_size=3,
)
tool_lists = st.one_of(
    st.none(),
    st.lists(
        st.builds(
            lambda name, more: {"type": "function", "function": {"name": name, **more}},
            st.sampled_from(["f", "g"]),
            st.fixed_dictionaries({}, optional={"description": texts, "parameters": values, "strict": st.booleans()}),
        ),
        min_size=1,
        max_size=2,
    ),
)
reasonings = st.one_of(st.none(), texts)


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """Anything an agent may send first: few-shot turns, results in any order or missing, systems anywhere."""
    out: list[Message] = []
    ids = draw(st.permutations([f"call_{n}" for n in range(12)]))
    for _ in range(draw(st.integers(1, 6))):
        role = draw(st.sampled_from(["system", "user", "user", "assistant", "assistant", "tool", "latest_reminder"]))
        message: Message = {"role": role, "content": draw(texts)}
        out.append(message)
        if role == "tool":
            message["tool_call_id"] = draw(st.sampled_from(ids))
        if role == "assistant":
            message["reasoning_content"] = draw(reasonings)
            message["tool_calls"] = [{**call, "id": ids.pop()} for call in draw(calls) if len(ids) > 1]
            results = [{"role": "tool", "tool_call_id": c["id"], "content": draw(texts)} for c in message["tool_calls"]]
            out += draw(st.permutations(results))[: draw(st.sampled_from([3, 3, 3, 1, 0]))]
    return out


settings_of_a_request = (st.booleans(), st.sampled_from([None, "low", "high", "xhigh", "max"]))


# -- first turns -----------------------------------------------------------------------------------------------------


def golden_conversations() -> list[dict[str, Any]]:
    """Those of the older encoder that the package's types can hold, with arguments as text."""
    found = []
    for row in golden_rows("deepseekv4"):
        messages = copy.deepcopy(row["messages"])
        if any(m["role"] not in ROLES or not isinstance(m.get("content") or "", str) for m in messages):
            continue
        for message in messages:
            message["content"] = message.get("content") or ""
            for function in (call["function"] for call in message.get("tool_calls") or []):
                if not isinstance(function["arguments"], str):
                    function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        found.append({**row, "messages": messages})
    return found


def test_the_golden_conversations() -> None:
    rows, differ = golden_conversations(), []
    for row in rows:
        kwargs = FAMILY.merge_kwargs(row["chat_template_kwargs"])
        asked = (row["messages"], row["tools"], kwargs["thinking"], kwargs.get("reasoning_effort"))
        if ours(*asked) != as_declared(*asked):
            differ.append((row["case"], row["chat_template_kwargs"]))
    assert len(rows) > 150
    assert not differ


@often
@given(conversations(), tool_lists, *settings_of_a_request)
def test_generated_conversations(messages: list[Message], tools: Tools, thinking: bool, effort: str | None) -> None:
    if sorts_across_a_turn(messages):
        return
    assert ours(messages, tools, thinking, effort) == as_declared(messages, tools, thinking, effort)


@often
@given(st.lists(texts, max_size=2), st.lists(texts, min_size=1, max_size=2), tool_lists, *settings_of_a_request)
def test_a_session_that_starts_from_a_question_has_no_departure(
    systems: list[str], users: list[str], tools: Tools, thinking: bool, effort: str | None
) -> None:
    messages = [{"role": "system", "content": text} for text in systems]
    messages += [{"role": "user", "content": text} for text in users]
    assert ours(messages, tools, thinking, effort) == package(messages, tools, thinking, effort)


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("effort", [None, "none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"])
def test_a_request_as_sglang_hands_it_over(effort: str | None, thinking: bool) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": ["integer", "null"], "minimum": -1.5}}}
    tools = [{"type": "function", "function": {"name": "f", "description": "é", "parameters": parameters}}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    body = {"model": "DeepSeek-V4-Pro", "messages": messages, "tools": tools}
    body |= {"thinking": {"type": "enabled" if thinking else "disabled"}}
    body |= {"reasoning_effort": effort} if effort else {}
    converted = recipe.ChatCompletionRequest(json.dumps(body)).convert(recipe.ConversionOptions())
    assert ours(messages, tools, thinking, effort) == ENCODING.render_conversation(converted.conversation).prompt


# -- what is declared, one by one --------------------------------------------------------------------------------------


def call(name: str, arguments: str = "{}", id: str = "call_0") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


ASKED: Message = {"role": "user", "content": "u"}


def test_reasoning_without_tools_stays_since_it_was_sampled() -> None:
    messages = [ASKED, {"role": "assistant", "content": "c", "reasoning_content": "R"}, ASKED]
    assert "<｜Assistant｜></think>c" in package(messages, None, True, None)
    assert "<｜Assistant｜><think>R</think>c" in ours(messages, None, True, None)


def test_calls_stay_in_the_order_in_which_they_were_sampled_and_results_follow_them() -> None:
    said = {"role": "assistant", "content": "", "tool_calls": [call("second", id="b"), call("first", id="a")]}
    results = [{"role": "tool", "tool_call_id": id, "content": f"of {id}"} for id in ("a", "b")]
    theirs, mine = (write([ASKED, said, *results], None, False, None) for write in (package, ours))
    assert theirs.index('"first"') < theirs.index('"second"')
    assert theirs.index("of a") < theirs.index("of b")
    assert mine.index('"second"') < mine.index('"first"')
    assert mine.index("of b") < mine.index("of a")


def test_a_result_does_not_move_in_front_of_an_assistant_turn() -> None:
    said = {"role": "assistant", "content": "", "tool_calls": [call("f"), call("f", id="call_1")]}
    messages = [ASKED, said, {"role": "assistant", "content": "later"}, {"role": "tool", "content": "result"}]
    assert sorts_across_a_turn(messages)
    theirs, mine = (write(messages, None, False, None) for write in (package, ours))
    assert theirs.index("result") < theirs.index("later")
    assert mine.index("later") < mine.index("result")


@pytest.mark.parametrize(
    ("number", "rounded"),
    [("18446744073709551616", "1.8446744073709552e+19"), ("100000000000000000000000", "1e+23"), ("-0", "-0.0")],
)
def test_numbers_that_the_package_rounds(number: str, rounded: str) -> None:
    """A number that was sampled stays what it was; `-0` is the integer 0 here, and a float in the package."""
    messages = [ASKED, {"role": "assistant", "content": "", "tool_calls": [call("f", f'{{"a": {number}}}')]}]
    assert f'string="false">{rounded}</' in package(messages, None, False, None)
    assert f'string="false">{int(number)}</' in ours(messages, None, False, None)


# -- later turns -------------------------------------------------------------------------------------------------------


@settings(often, max_examples=150)
@given(conversations(), conversations(), tool_lists, *settings_of_a_request)
def test_later_turns_only_append(
    first: list[Message], more: list[Message], tools: Tools, thinking: bool, effort: str | None
) -> None:
    sampled = {"role": "assistant", "content": "c", "reasoning_content": "r" if thinking else None}
    appended = [message for message in more if message["role"] in FAMILY.family.allowed_append_roles]
    if any(m.get("tool_calls") for m in first):
        sampled["tool_calls"] = [call("f", id="call_1"), call("g", '{"a": "b"}', "call_0")]
    kwargs = FAMILY.merge_kwargs({"thinking": thinking, **({"reasoning_effort": effort} if effort else {})})
    before = FAMILY.render([*first, sampled], tools, kwargs, add_generation_prompt=False)
    suffix = FAMILY.render_suffix(sampled, appended, tools, kwargs)
    whole = FAMILY.render([*first, sampled, *appended], tools, kwargs)
    assert before + suffix == whole
    kept, bridge = FAMILY.join(FAMILY.encode(before), FAMILY.encode(suffix))
    assert [*FAMILY.encode(before)[:kept], *bridge, *FAMILY.encode(suffix)] == FAMILY.encode(whole)
