"""Odd input to every family: nothing is lost, nothing is spelled as Python spells it, only our errors are raised."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

import pytest

from helpers.golden import golden_family, golden_names
from helpers.odd_input import ODD_ARGUMENTS, PYTHON, Maker, markers
from miles_core.errors import MilesError, RenderError
from miles_core.types import Message

every_family = pytest.mark.parametrize("name", golden_names())
CONVERSATIONS = 120
"""Made up anew by each of the two long tests, for each family."""

STRICT_ABOUT_RESULTS = ("deepseekv32", "minimax_m25", "minimax_m27")
"""Formats that have a place for results only behind the calls they answer."""

SYSTEM_FIRST = ("qwen35", "minimax_m25", "minimax_m27")
"""Formats that have a place for a system message only at the start."""

PYTHON_SCALARS = ("qwen35", "nemotron3", "nemotron3@ultra")
"""Models that were trained on `True` and `None` in arguments."""

ASKED: Message = {"role": "user", "content": "u"}
CALL = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED: Message = {"role": "assistant", "content": "c", "tool_calls": [CALL]}
RESULT: Message = {"role": "tool", "tool_call_id": "functions.f:0", "content": "r"}


def is_object(arguments: Any) -> bool:
    """Whether arguments spell a JSON object."""
    try:
        return isinstance(json.loads(arguments, parse_constant=float), dict) and "NaN" not in arguments
    except (TypeError, ValueError):
        return False


def conversation(make: Maker, name: str) -> tuple[list[Message], list[Message]]:
    """A history that ends with a generation, and messages to append, all in roles and places that the format has."""
    history = [make.system()] if make.often() else []
    for _ in range(make.one(0, 1, 2)):
        said = make.assistant()
        history += [make.user(), said, *make.results(said), *stray(make, name)]
    last = make.assistant()
    results = make.results(last)
    appended = results[: make.one(len(results), len(results), 0)] + stray(make, name)
    appended += [make.user()] if make.often() else []
    if make.seldom():
        appended += [make.assistant(), make.user()]
    return [*history, make.user(), last], appended or [make.user()]


def stray(make: Maker, name: str) -> list[Message]:
    """Messages where few would put them."""
    found = [make.user()] if make.seldom() else []
    found += [make.result()] if make.seldom() and name not in STRICT_ABOUT_RESULTS else []
    can_be_appended = "system" in golden_family(name).family.allowed_append_roles
    return found + ([make.system()] if make.seldom() and can_be_appended else [])


def kept(name: str, messages: Sequence[Message], tools: Any) -> set[str]:
    """The markers that a prompt must hold. Kimi calls functions by ids, and writes of tools what TypeScript has."""
    if not name.startswith("kimi"):
        return markers(list(messages)) | markers(tools)
    calls = [call for message in messages for call in message.get("tool_calls") or []]
    names = [call["function"]["name"] for call in calls if call.get("id")]
    functions = [tool.get("function", tool) for tool in tools or []]
    return markers(list(messages)) - markers(names) | markers([function["name"] for function in functions])


def leaked(name: str, text: str) -> list[str]:
    """Python values in a prompt, but for those that a model was trained on."""
    if name.startswith("nemotron3"):
        text = text.replace("['integer', 'null']", "")
    trained = ("True", "False", "None") if name in PYTHON_SCALARS or name.startswith("kimi") else ()
    found = [m for m in PYTHON.finditer(text) if m.group() not in trained]
    return [text[max(0, m.start() - 40) : m.end() + 20] for m in found]


WAYS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"enable_thinking": False, "thinking": False},
    {"enable_thinking": True, "reasoning_effort": "low"},
)
"""Template kwargs. With thinking off some formats write no reasoning."""


@every_family
def test_nothing_is_lost_and_turns_join(name: str) -> None:
    for seed in range(CONVERSATIONS):
        family, make = golden_family(name), Maker(seed)
        history, appended = conversation(make, name)
        tools = [make.tool() for _ in range(make.one(0, 0, 1, 2))] or make.one(None, [])
        messages, kwargs = [*history, *appended], family.merge_kwargs(make.one(*WAYS))

        before = family.render(history, tools, kwargs, False)
        suffix = family.render_suffix(history[-1], appended, tools, kwargs)
        whole = family.render(messages, tools, kwargs)

        said = f"seed {seed}, {kwargs}: {json.dumps([messages, tools])}"
        assert before + suffix == whole, said
        unwritten = [m.get("reasoning_content") for m in messages if kwargs.get("thinking") is False]
        assert not kept(name, messages, tools) - markers(unwritten) - markers(whole), said
        assert not leaked(name, whole), said
        checkpoint, ids = family.encode(before), family.encode(suffix)
        keeps, bridge = family.join(checkpoint, ids)
        assert [*checkpoint[:keeps], *bridge, *ids] == family.encode(whole), said


@every_family
def test_whatever_is_sent_is_written_or_refused(name: str) -> None:
    """Anything of the wrong kind anywhere: the error is ours, and says where."""
    family, written = golden_family(name), 0
    refusals: list[MilesError] = []
    for seed in range(CONVERSATIONS):
        make = Maker(seed)
        history, appended, tools = copy.deepcopy((*conversation(make, name), [make.tool()]))
        spoilt = make.one(*objects([history[-1], *appended, *tools]))
        spoilt[make.one(*spoilt, "name", "tool_calls", "content")] = copy.deepcopy(make.one(*WRONG, make.value()))
        kwargs = {make.one(*KWARGS): make.one(*WRONG) for _ in range(make.one(0, 1, 2))}
        try:
            merged = family.merge_kwargs(kwargs)
            family.encode(family.render([*history, *appended], tools, merged))
            family.encode(family.render_suffix(history[-1], appended, tools, merged))
            written += 1
        except MilesError as error:
            refusals.append(error)
    assert written > 10
    assert len(refusals) > 10
    assert {error.status for error in refusals} == {400}


def objects(value: Any) -> list[dict[str, Any]]:
    """Every object in a JSON value, at any depth."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return [*([value] if isinstance(value, dict) else []), *(found for part in inner for found in objects(part))]


WRONG = (None, True, 0, -1, 2**70, 10**5000, 1.5, float("nan"), float("inf"), "", "x", "\ud800", [], [None], [[]],
         ["x"], {}, {"a": None}, [{"type": "text"}], [{"function": 1}], [{"function": {"name": 1}}])  # fmt: skip
KWARGS = ("enable_thinking", "thinking", "reasoning_effort", "model_identity", "tools_ts_str", "documents", "messages",
          "tools", "loop", "self", "namespace", "raise_exception", "clear_thinking", "bos_token")  # fmt: skip


# -- arguments ---------------------------------------------------------------------------------------------------------


def called_with(arguments: Any) -> Message:
    return {**CALLED, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": arguments}}]}


@every_family
def test_arguments_that_are_no_object_are_written_as_the_text_they_are(name: str) -> None:
    for arguments in ODD_ARGUMENTS:
        if arguments is not None and not is_object(arguments):
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            assert text in golden_family(name).render([ASKED, called_with(arguments), RESULT])


@every_family
def test_arguments_that_are_missing_or_null_are_the_empty_object(name: str) -> None:
    family, call = golden_family(name), {"name": "f"}
    empty = family.render([ASKED, called_with({}), RESULT])
    assert family.render([ASKED, called_with("{}"), RESULT]) == empty
    assert family.render([ASKED, called_with(None), RESULT]) == empty
    assert family.render([ASKED, {**CALLED, "tool_calls": [{**CALL, "function": call}]}, RESULT]) == empty


@every_family
@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ('{"n": 123456789012345678901234567890}', "123456789012345678901234567890"),
        ('{"n": "12", "m": "true"}', "12"),
        ('{"n": "\\ud83d\\ude42"}', "🙂"),
        ('{"n": "\\ud800"}', "\\ud800"),
        ('{"a": 1, "a": 2}', "2"),
    ],
)
def test_values_keep_their_spelling(name: str, arguments: str, written: str) -> None:
    assert written in golden_family(name).render([ASKED, called_with(arguments), RESULT])


@every_family
@pytest.mark.parametrize("deep", ["[" * 5000, '{"a":' * 5000 + "1" + "}" * 5000], ids=["open", "whole"])
def test_text_that_is_nested_too_deep_to_be_read_stays_text(name: str, deep: str) -> None:
    assert deep in golden_family(name).render([ASKED, called_with(deep), RESULT])


@every_family
@pytest.mark.parametrize("where", ["arguments", "list", "tools"])
def test_what_is_nested_too_deep_to_be_written_is_refused(name: str, where: str) -> None:
    value: Any = 1
    for _ in range(100_000):
        value = {"a": value}
    tools = [{"type": "function", "function": {"name": "f", "parameters": value}}] if where == "tools" else None
    arguments = {"arguments": value, "list": [value], "tools": {}}[where]
    with pytest.raises(RenderError):
        golden_family(name).render([ASKED, called_with(arguments), RESULT], tools)


@every_family
def test_a_call_without_a_name_is_refused_with_its_place(name: str) -> None:
    calls: list[Any] = [{}, {"function": {}}, {"function": {"name": None}}, {"name": 5}, "f", None]
    for call in calls:
        with pytest.raises(RenderError, match=r"messages\[1\]\.tool_calls\[1\] has no function name"):
            golden_family(name).render([ASKED, {**CALLED, "tool_calls": [CALL, call]}])


# -- content -----------------------------------------------------------------------------------------------------------

ROLES = ("system", "user", "assistant", "tool")


def with_content(role: str, **content: Any) -> list[Message]:
    """A conversation in which one message of that role has this content."""
    if role == "system":
        return [{"role": role, **content}, ASKED]
    if role == "tool":
        return [ASKED, CALLED, {"role": role, "tool_call_id": CALL["id"], **content}]
    return [ASKED, CALLED, RESULT, {"role": role, **content}]


@every_family
@pytest.mark.parametrize("role", ROLES)
def test_no_content_is_the_empty_text(name: str, role: str) -> None:
    family, empty = golden_family(name), [{"type": "text", "text": ""}]
    wanted = family.render(with_content(role, content=""))
    assert [family.render(with_content(role, content=none)) for none in (None, [], empty)] == [wanted] * 3
    assert family.render(with_content(role)) == wanted


@every_family
@pytest.mark.parametrize("role", ROLES)
def test_one_part_is_its_text_and_several_are_written_whole(name: str, role: str) -> None:
    family = golden_family(name)
    for part in ({"type": "text", "text": "one"}, {"type": "input_text", "text": "one"}, {"text": "one"}, "one"):
        assert family.render(with_content(role, content=[part])) == family.render(with_content(role, content="one"))
    several = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}, "three"]
    text = family.render(with_content(role, content=several))
    if role == "tool" or family.family.content_format == "string":
        assert text == family.render(with_content(role, content="one two three"))
    elif name != "inkling":  # which has a block for each
        assert text == family.render(with_content(role, content="onetwothree"))
    assert all(part in text for part in ("one", "two", "three"))


@every_family
@pytest.mark.parametrize("role", ROLES)
def test_media_is_refused_and_the_way_to_have_it_is_named(name: str, role: str) -> None:
    for kind in ("image", "image_url", "input_image", "audio_url", "input_audio", "video", "video_url"):
        content = [{"type": "text", "text": "Look:"}, {"type": kind, kind: {"url": "data:,"}}]
        told = rf"content\[1\] is a part of type '{kind}'.*text only; use a generate function \(--generate\)"
        with pytest.raises(RenderError, match=told):
            golden_family(name).render(with_content(role, content=content))


@every_family
def test_a_part_without_text_is_refused_with_its_place(name: str) -> None:
    told = r"messages\[0\]\.content\[1\] is .* expected \{'type': 'text', 'text': …\}"
    parts: list[Any] = [{"type": "text"}, {"type": "text", "text": None}, {"type": "other"}, {}, 5, None, []]
    for part in parts:
        with pytest.raises(RenderError, match=told):
            golden_family(name).render([{"role": "user", "content": ["one", part]}])


@every_family
def test_what_is_empty_is_as_if_it_were_not_there(name: str) -> None:
    family = golden_family(name)
    wanted = family.render([ASKED, {"role": "assistant", "content": "c"}, ASKED])
    for more in ({"tool_calls": []}, {"tool_calls": None}, {"reasoning_content": None}):
        assert family.render([ASKED, {"role": "assistant", "content": "c", **more}, ASKED]) == wanted
    assert [family.render([ASKED], none) for none in (None, [])] == [family.render([ASKED])] * 2


@every_family
def test_a_result_of_a_megabyte_is_written_whole(name: str) -> None:
    family, result = golden_family(name), {**RESULT, "content": "<line> 数 {'a': None}\n" * 50_000 + "end"}
    assert result["content"] in family.render([ASKED, CALLED, result])
    assert result["content"] in family.render_suffix(CALLED, [result])


@every_family
@pytest.mark.parametrize("role", ROLES)
def test_text_that_spells_a_control_token_becomes_it(name: str, role: str) -> None:
    family = golden_family(name)
    stop = family.stop_ids[0]
    plain, spelt = (
        family.encode(family.render(with_content(role, content=text)))
        for text in ("before and after", f"before {family.tokenizer.decode([stop])} after")
    )
    assert spelt.count(stop) == plain.count(stop) + 1


@every_family
def test_text_that_is_not_unicode_is_refused(name: str) -> None:
    family = golden_family(name)
    with pytest.raises(RenderError, match="not valid Unicode"):
        family.encode(family.render([{"role": "user", "content": "\ud83d"}]))


@every_family
def test_a_role_that_no_format_has_is_refused(name: str) -> None:
    messages: list[Any] = [{"role": "robot"}, {"role": ""}, {"role": None}, {"role": ["user"]}, {}, 5, None]
    for message in messages:
        with pytest.raises(RenderError, match=r"has no role|messages\[1\] is"):
            golden_family(name).render([ASKED, message])


@pytest.mark.parametrize("name", ["kimi25", "kimi26"])
def test_a_kimi_says_which_message_has_the_role(name: str) -> None:
    with pytest.raises(RenderError) as raised:
        golden_family(name).render([ASKED, {"role": "robot", "content": "x"}])
    assert raised.value.message == "Kimi has no role 'robot' (messages[1]); it knows system, user, assistant and tool"


# -- tools -------------------------------------------------------------------------------------------------------------


@every_family
def test_a_bare_function_is_wrapped_and_nothing_else_is_changed(name: str) -> None:
    family = golden_family(name)
    function = {"name": "f", "parameters": {"type": "object"}, "description": "d é 🙂", "strict": True}
    wrapped = family.render([ASKED], [{"type": "function", "function": function}])
    assert family.render([ASKED], [function]) == wrapped
    assert family.render([ASKED], [{"type": "function", **function}]) == wrapped
    assert "d é 🙂" in wrapped


@every_family
def test_tools_that_are_none_are_refused(name: str) -> None:
    wrong: list[Any] = [{}, "f", 5, True, [5], [None], ["f"], [[]], [{"type": "function"}, 5]]
    for tools in wrong:
        with pytest.raises(RenderError, match=r"tools(\[\d\])? is .* expected (a list|an object)"):
            golden_family(name).render([ASKED], tools)
