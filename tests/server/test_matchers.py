"""Matchers in both modes, over HTTP: what is recognised keeps its tokens and spelling, the rest is another history."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from helpers.chat_tokenizer import IM_END
from helpers.distributions import distribution, module
from helpers.fake_engine import FakeEngine, says
from helpers.given_matchers import Sorted
from helpers.sessions import WEATHER, Message, Serve, Talk, assistant, tool, user
from miles_core.errors import PluginLoadError
from miles_core.plugins import Registry
from miles_core.server.app import ServerThread
from miles_core.server.settings import ServerSettings

STRICT, LOOSE, ROLE = "strict", "loose_tool_call", "role_content_only"
ALL, ARGUMENTS, ROLE_ONLY = {STRICT, LOOSE, ROLE}, {LOOSE, ROLE}, {ROLE}

HISTORIES = ("linear", "tree")
ASKED = user("Weather?")


@dataclass(frozen=True)
class Form:
    """How an agent sends a stored answer back, and the matchers that recognise it."""

    by: set[str]
    change: Callable[[Message], Any]
    arguments: tuple[str, ...] = ('{"a":1,"b":{"x":2,"y":3}}',)
    content: str = ""


def arguments(value: Any, at: int = 0) -> Callable[[Message], Any]:
    """Other arguments of a call."""
    return lambda message: message["tool_calls"][at]["function"].update(arguments=value)


def drop(*keys: str) -> Callable[[Message], Any]:
    return lambda message: [message.pop(key) for key in keys]


def put(**values: Any) -> Callable[[Message], Any]:
    return lambda message: message.update(values)


def in_call(**values: Any) -> Callable[[Message], Any]:
    return lambda message: message["tool_calls"][0].update(values)


DEEP = '{"a":' * 3000 + "1" + "}" * 3000
LARGE = '{"a":1e999999999}'

FORMS = {
    "as it was": Form(ALL, lambda message: None),
    "content null": Form(ALL, put(content=None)),
    "content missing": Form(ALL, drop("content")),
    "content an empty list": Form(ALL, put(content=[])),
    "index left out": Form(ALL, lambda message: [call.pop("index") for call in message["tool_calls"]]),
    "unknown keys": Form(ALL, put(refusal=None, annotations=[], function_call=None, name="x")),
    "content in a part": Form(ALL, put(content=[{"type": "text", "text": "Hm. "}]), content="Hm. "),
    "content as bare text": Form(ALL, put(content=["Hm. "]), content="Hm. "),
    "content in two parts": Form(ALL, put(content=[{"type": "text", "text": t} for t in "ab"]), content="a b"),
    "content stripped": Form(set(), put(content="Hm."), content="Hm. "),
    "arguments in another order": Form(ARGUMENTS, arguments('{ "b": {"y": 3, "x": 2}, "a": 1 }')),
    "arguments as an object": Form(ARGUMENTS, arguments({"b": {"y": 3, "x": 2}, "a": 1})),
    "arguments with 1.0": Form(ARGUMENTS, arguments('{"a":1.0,"b":{"x":2e0,"y":30e-1}}')),
    "arguments with true": Form(ROLE_ONLY, arguments('{"a":true,"b":{"x":2,"y":3}}')),
    "arguments with text": Form(ROLE_ONLY, arguments('{"a":"1","b":{"x":2,"y":3}}')),
    "arguments {} as nothing": Form(ARGUMENTS, arguments(""), arguments=("{}",)),
    "arguments {} as null": Form(ARGUMENTS, arguments(None), arguments=("{}",)),
    "arguments with a large exponent": Form(ARGUMENTS, arguments('{"a": 1E+999999999}'), arguments=(LARGE,)),
    "arguments with another": Form(ROLE_ONLY, arguments('{"a": 1e999999998}'), arguments=(LARGE,)),
    "arguments beyond every exponent": Form(
        ARGUMENTS, arguments('{"a": 10e9999999999999999999}'), arguments=('{"a": 1e10000000000000000000}',)
    ),
    "arguments with a double key": Form(ROLE_ONLY, arguments('{"a":1}'), arguments=('{"a":1,"a":1}',)),
    "arguments with NaN": Form(ROLE_ONLY, arguments('{"a": NaN}'), arguments=('{"a":NaN}',)),
    "arguments nested deep": Form(ALL, lambda message: None, arguments=(DEEP,)),
    "arguments nested deep, spaced": Form(ROLE_ONLY, arguments(f" {DEEP}"), arguments=(DEEP,)),
    "arguments in a list": Form(ROLE_ONLY, arguments("[ 1 ]"), arguments=("[1]",)),
    "arguments broken": Form(ALL, lambda message: None, arguments=("{bad",)),
    "another id": Form(ROLE_ONLY, in_call(id="other")),
    "another type": Form(ROLE_ONLY, in_call(type="custom")),
    "another key of a call": Form(ROLE_ONLY, in_call(extra=None)),
    "calls in another order": Form(
        ROLE_ONLY, lambda message: message["tool_calls"].reverse(), arguments=('{"a":1}', '{"a":2}')
    ),
    "calls left out": Form(ROLE_ONLY, drop("tool_calls")),
    "reasoning left out": Form(ROLE_ONLY, drop("reasoning_content")),
    "reasoning stripped": Form(ROLE_ONLY, put(reasoning_content="Well")),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("matcher", [STRICT, LOOSE, ROLE])
@pytest.mark.parametrize("history", HISTORIES)
def test_what_comes_back_is_recognised_or_another_history(
    servers: Any, engine: FakeEngine, history: str, matcher: str, form: str
) -> None:
    given, talk = FORMS[form], Talk(servers(history, matcher).url)
    calls = [("get_weather", text) for text in given.arguments]
    first, second, third = says(given.content, calls=calls), says("Two."), says("Three.")
    engine.plays(first, second, third)
    talk.ask(ASKED, tools=[WEATHER])
    stored = talk.history[-1]
    replayed = copy.deepcopy(stored)
    given.change(replayed)
    answer = talk.post([ASKED, replayed, tool("18")], tools=[WEATHER])
    assert answer.status == 200, answer.body
    prompts = [turn["input_ids"] for turn in engine.turns]
    checkpoint = [*prompts[0], *first.ids]
    if matcher not in given.by:
        assert_another_history(talk, history, len(checkpoint))
        return
    assert prompts[1][: len(checkpoint)] == checkpoint
    assert engine.turns[1]["messages"] == [ASKED, stored, tool("18")], "the stored spelling goes on"
    told = talk.post([ASKED, stored, tool("18"), answer.message, user("v")], tools=[WEATHER])
    assert told.status == 200, "and what is stored is still recognised"
    prompt = engine.turns[2]["input_ids"]
    assert prompt[: len(prompts[1]) + len(second.ids)] == [*prompts[1], *second.ids]
    (sample,) = talk.samples().samples
    assert int(sample["loss_mask"].sum()) == sum(len(reply.ids) for reply in (first, second, third))


def assert_another_history(talk: Talk, history: str, first: int) -> None:
    """The answer was no generation to the request that sent it back changed."""
    metadata = talk.metadata
    if history == "linear":
        assert len(talk.records) == 1
        assert metadata["rolled_back"] == 1
        assert metadata["diverged"]["message"] == 1
    else:
        nodes = metadata["tree"]["nodes"]
        assert [node["parent"] for node in nodes] == [None, None]
        assert nodes[0]["num_tokens"] == first
    kept = talk.samples().samples
    assert len(kept) == (1 if history == "linear" else 2)
    for sample in kept:  # the answer that was sent back is trained on where it was sampled, nowhere else
        response = sample["tokens"][-sample["response_length"] :]
        assert (response[sample["loss_mask"] == 1] == IM_END).sum() == 1


# -- matchers of others ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("path", ["without_case", "Sorted"])
def test_a_matcher_by_its_path(serve: Serve, engine: FakeEngine, history: str, path: str) -> None:
    server = serve(message_matcher=f"helpers.given_matchers.{path}", history=history)
    talk = Talk(server.url)
    first, second = says("One."), says("Two.")
    engine.plays(first, second)
    talk.ask(user("u"))
    assert talk.post([user("U"), assistant("ONE."), user("v")]).status == 200
    assert engine.turns[1]["messages"][:2] == talk.history
    checkpoint = [*engine.turns[0]["input_ids"], *first.ids]
    assert engine.turns[1]["input_ids"][: len(checkpoint)] == checkpoint


def test_keys_spare_the_matcher_what_cannot_match_and_decide_nothing(
    engine: FakeEngine, checkpoint: Path, registry: Registry, shared_engine: FakeEngine
) -> None:
    path = "helpers.given_matchers.Sorted"
    settings = ServerSettings(
        checkpoint=str(checkpoint), tito_model="qwen3", engine_urls=(shared_engine.url,), history="tree",
        message_matcher=path,
    )  # fmt: skip
    with ServerThread(settings, registry) as server:
        talk = Talk(server.url)
        matcher = getattr(server.parts.matcher.hook("message_matches"), "__self__", None)
        assert isinstance(matcher, Sorted)
        for text in ("a", "bb", "cc"):
            engine.plays(says(text))
            talk.post([user(text)])
        matcher.asked.clear()
        answer = talk.post([user("BB"), assistant("BB"), user("x")])
        assert answer.status == 200
    assert matcher.asked == [("cc", "BB"), ("bb", "BB"), ("bb", "BB")]
    assert engine.turns[3]["messages"][:2] == [user("bb"), engine.turns[3]["messages"][1]]


@pytest.mark.parametrize("history", HISTORIES)
def test_a_matcher_that_is_installed(
    engine: FakeEngine, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, history: str
) -> None:
    distribution(tmp_path, "zz-matchers", groups={"miles.matchers": {"zz_any_user": "zz_any_user"}})
    source = "def message_matches(stored, replayed):\n    return stored['role'] == replayed['role'] == 'user'\n"
    module(tmp_path, "zz_any_user", source)
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = ServerSettings(
        checkpoint=str(checkpoint), tito_model="qwen3", engine_urls=(engine.url,), history=history,
        message_matcher="zz-matchers:zz_any_user",
    )  # fmt: skip
    with ServerThread(settings, Registry.discover(path=sys.path)) as server:
        talk = Talk(server.url)
        talk.ask(user("u"))
        assert talk.post([user("other"), talk.history[1], user("v")]).status == 200, "no answer is ever recognised"
        if history == "tree":
            assert [node["parent"] for node in talk.metadata["tree"]["nodes"]] == [None, None]
        else:
            assert len(talk.records) == 1
    sys.modules.pop("zz_any_user", None)


FAULTS = {
    "raises": "ValueError: no opinion",
    "answers_one": "message_matches returned 1 (int), expected True or False",
    "answers_nothing": "message_matches returned None (NoneType), expected True or False",
    "raises_ours": "failed in message_matches: HistoryError: not this one",
    "leaves": "message_matches",
    "answers_later": "(coroutine), expected True or False",
}


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_500_naming_the_matcher_and_decides_nothing(
    serve: Serve, engine: FakeEngine, history: str, name: str
) -> None:
    talk = Talk(serve(message_matcher=f"helpers.faulty_matchers.{name}", history=history).url)
    talk.ask(user("u"))
    before = talk.state()
    for stream in (False, True):
        answer = talk.post([*talk.history, user("v")], stream=stream)
        assert answer.status == 500
        assert answer.json["type"] == "plugin_error"
        assert FAULTS[name] in answer.error
        assert f"helpers.faulty_matchers.{name}" in answer.error
    assert talk.state() == before
    assert len(engine.turns) == 1


@pytest.mark.parametrize(
    ("name", "text"), [("UnhashableKey", "cannot be looked up"), ("RaisingKey", "failed in message_key: KeyError")]
)
def test_a_fault_of_its_keys_is_too(serve: Serve, engine: FakeEngine, name: str, text: str) -> None:
    talk = Talk(serve(message_matcher=f"helpers.faulty_matchers.{name}", history="tree").url)
    before = talk.state()
    answer = talk.post([user("u")])
    assert answer.status == 500
    assert text in answer.error
    assert f"helpers.faulty_matchers.{name}" in answer.error
    assert talk.state() == before


@pytest.mark.parametrize(
    ("setting", "path"),
    [
        ("message_matcher", "helpers.faulty_matchers.asynchronous"),
        ("pick_samples", "helpers.sample_hooks.pick_later"),
        ("postprocess_samples", "helpers.sample_hooks.postprocess_later"),
    ],
)
def test_an_async_hook_is_refused_at_start_up(serve: Serve, setting: str, path: str) -> None:
    with pytest.raises(PluginLoadError) as refused:
        serve(history="tree", **{setting: path})
    assert path in refused.value.message
    assert "which is called without await" in refused.value.message
