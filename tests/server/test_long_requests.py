"""Requests of more than a megabyte, which threads read and compare: served as short ones are."""

from __future__ import annotations

import pytest

from helpers.fake_engine import FakeEngine
from helpers.sessions import Message, Serve, Talk, assistant, tool, user
from miles_core.server import service

HISTORIES = ("linear", "tree")
MANY: list[Message] = [message for n in range(2500) for message in (user(f"é {n} " * 20), assistant(f'"{n}"' * 30))]
TOOLS = [
    {"type": "function", "function": {"name": f"f{n}", "description": "does nothing " * 20, "parameters": {}}}
    for n in range(1500)
]


@pytest.fixture(autouse=True)
def short_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said of requests beyond this length is true of any length."""
    monkeypatch.setattr(service, "LONG_BODY", 2**16)


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("kind", ["messages", "text", "tools"])
def test_a_conversation_of_long_requests(serve: Serve, engine: FakeEngine, history: str, kind: str) -> None:
    talk = Talk(serve(history=history).url)
    first = {"messages": [*MANY[:600], user("go")], "text": [user("é→ word\n" * 20_000)], "tools": [user("go")]}[kind]
    extra = {"tools": TOOLS[:400]} if kind == "tools" else {}
    talk.ask(*first, **extra)
    talk.ask(user("on"), **extra)
    talk.ask(tool("done"), **extra)
    one, two, three = engine.turns
    assert one["messages"] == first
    assert three["messages"] == talk.history[:-1]
    assert all(turn.get("tools") == extra.get("tools") for turn in (one, two, three))
    assert three["input_ids"][: len(two["input_ids"])] == two["input_ids"]
    assert two["input_ids"][: len(one["input_ids"])] == one["input_ids"]
    assert len(talk.records) == 3
    assert len(talk.samples().samples) == 1
    assert "tools_changed" not in talk.metadata


@pytest.mark.parametrize("history", HISTORIES)
def test_a_changed_message_in_a_long_request_is_another_history(serve: Serve, engine: FakeEngine, history: str) -> None:
    talk = Talk(serve(history=history, max_rollback=5).url)
    talk.ask(*MANY[:600], user("go"))
    talk.ask(user("on"))
    changed = [*talk.history[:10], user("changed"), *talk.history[11:], user("more")]
    answer = talk.post(changed)
    assert answer.status == 200
    assert engine.turns[-1]["messages"] == changed
    assert len(talk.records) == 1
    assert len(talk.samples().samples) == (1 if history == "linear" else 2)


@pytest.mark.parametrize("history", HISTORIES)
def test_other_tools_of_a_long_request_are_other_tools(serve: Serve, engine: FakeEngine, history: str) -> None:
    talk = Talk(serve(history=history).url)
    talk.ask(user("go"), tools=TOOLS[:400])
    talk.ask(user("on"), tools=TOOLS[:401])
    assert [len(turn["tools"]) for turn in engine.turns] == [400, 401]
    if history == "linear":
        assert (len(talk.records), talk.metadata["tools_changed"]) == (2, True)
    else:
        assert [node["parent"] for node in talk.metadata["tree"]["nodes"]] == [None, None]


@pytest.mark.parametrize("name", ["raises", "answers_nothing"])
@pytest.mark.parametrize("history", HISTORIES)
def test_a_faulty_matcher_is_named(serve: Serve, engine: FakeEngine, history: str, name: str) -> None:
    talk = Talk(serve(message_matcher=f"helpers.faulty_matchers.{name}", history=history).url)
    talk.ask(*MANY[:600], user("go"))
    answer = talk.post([*talk.history, user("on")])
    assert answer.status == 500
    assert f"helpers.faulty_matchers.{name}" in answer.error
    assert len(talk.records) == 1


@pytest.mark.parametrize(
    ("messages", "tools", "error"),
    [
        ([*MANY[:600], "no message"], None, "messages[600] must be an object with a role (found 'no message')"),
        ([*MANY[:600], user("go")], {"a": 1}, "tools is an object, expected a list"),
        ([*MANY[:600], user("go")], [*TOOLS[:70], 7], "tools[70] is a number, expected an object"),
    ],
)
def test_what_is_wrong_is_said_as_of_short_ones(
    serve: Serve, engine: FakeEngine, messages: list[Message], tools: object, error: str
) -> None:
    talk = Talk(serve().url)
    answer = talk.post(messages, tools=tools)
    assert answer.status == 400
    assert answer.error == error
    assert engine.turns == []
