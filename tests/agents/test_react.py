"""The tool loop over Python functions, against a scripted session server."""

from __future__ import annotations

import asyncio
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from types import ModuleType
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from helpers.fake_sessions import FakeSession, FakeSessions, say, serving
from miles_agents.react import ReactAgent, load_tools
from miles_core.errors import ConfigError
from miles_core.types import Message

MEETING: list[asyncio.Event] = []


def add(a: int, b: int = 1, *, unit: Literal["m", "km"] | None = None) -> int:
    """Add two numbers.

    Not shown to the model.
    """
    return a + b


async def meet(n: int) -> str:
    """Return when both calls are under way, the first one last."""
    MEETING[n].set()
    await asyncio.gather(*(event.wait() for event in MEETING))
    await asyncio.sleep(0.02 * (1 - n))
    return f"met {n}"


def fail() -> None:
    """Never works."""
    raise ValueError("no luck")


def leave() -> None:
    """Ends the program."""
    raise SystemExit(2)


def facts(**anything: Any) -> dict[str, Any]:
    """What was given."""
    return anything


def call(name: str, arguments: str, number: int = 0) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def calls(*wanted: tuple[str, str]) -> Message:
    found = [call(name, arguments, number) for number, (name, arguments) in enumerate(wanted)]
    return {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": found}


async def run(
    script: list[Message], *tools: Callable[..., Any], max_turns: int = 16
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the agent returned, and the requests it made."""
    fake = FakeSessions(script=lambda request: script.pop(0) if script else say("Done."))
    fake.sessions["s"] = FakeSession()
    agent = ReactAgent(tools, max_turns=max_turns)
    async with serving(fake) as url:
        prompt: list[Message] = [{"role": "user", "content": "Go."}]
        result = await agent.run_agent(f"{url}/sessions/s", prompt, {"temperature": 0.5, "top_k": 7}, {})
    return result, fake.sessions["s"].requests


async def test_calls_are_run_and_answered() -> None:
    first = calls(("add", '{"a": 2, "b": 3}'), ("add", '{"a": 2}'))
    result, requests = await run([first, say("It is 5.")], add)
    assert (result["turns"], result["tool_calls"], result["answer"]) == (2, 2, "It is 5.")
    assert result["agent_metrics"]["total_tool_time"] > 0
    assert requests[1]["messages"][1:] == [
        first,
        {"role": "tool", "tool_call_id": "call_0", "content": "5"},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]
    assert {(each["temperature"], each["top_k"]) for each in requests} == {(0.5, 7)}
    assert requests[0]["tools"] == [
        {
            "type": "function",
            "function": {
                "name": "add",
                "description": "Add two numbers.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "a": {"type": "integer"},
                        "b": {"type": "integer"},
                        "unit": {"anyOf": [{"enum": ["m", "km"], "type": "string"}, {"type": "null"}]},
                    },
                    "required": ["a"],
                    "additionalProperties": False,
                },
            },
        }
    ]


async def test_calls_of_a_turn_run_at_once_and_keep_their_order() -> None:
    MEETING[:] = [asyncio.Event(), asyncio.Event()]
    _, requests = await run([calls(("meet", '{"n": 0}'), ("meet", '{"n": 1}'))], meet)
    assert [each["content"] for each in requests[1]["messages"][2:]] == ["met 0", "met 1"]


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("fail", "{}", "error: ValueError: no luck"),
        ("leave", "{}", "error: SystemExit: 2"),
        ("fial", "{}", "error: no tool is named fial; there is add, fail, leave, facts"),
        ("add", '{"a": "x"}', "Input should be a valid integer"),
        ("add", '{"c": 1}', "error: ValidationError"),
        ("add", "[1]", "Input should be a valid dictionary"),
        ("add", "{", "error: JSONDecodeError"),
        ("facts", '{"x": [1]}', '{"x": [1]}'),
    ],
)
async def test_what_goes_wrong_is_the_answer(name: str, arguments: str, text: str) -> None:
    result, requests = await run([calls((name, arguments))], add, fail, leave, facts)
    assert text in requests[1]["messages"][2]["content"]
    assert result["answer"] == "Done."


async def test_no_more_turns_than_allowed() -> None:
    result, requests = await run([calls(("add", '{"a": 1}'))] * 5, add, max_turns=2)
    assert (len(requests), result["turns"], result["tool_calls"]) == (2, 2, 1)


async def test_without_tools_one_turn_is_all() -> None:
    result, requests = await run([say("Hello.")])
    assert (result["turns"], "tools" in requests[0]) == (1, False)


def module(**values: Any) -> ModuleType:
    made = ModuleType("their_tools")
    vars(made).update(values)
    return made


def configured(monkeypatch: pytest.MonkeyPatch, *words: str) -> ReactAgent:
    def own(x: int) -> int:
        """Theirs."""
        return x

    def _hidden() -> None: ...

    own.__module__ = "their_tools"
    values = {"own": own, "_hidden": _hidden, "add": add, "both": [add, fail], "number": 3}
    monkeypatch.setitem(sys.modules, "their_tools", module(**values))
    agent, parser = ReactAgent(), ArgumentParser()
    agent.add_arguments(parser)
    agent.configure_agent(parser.parse_args(words))
    return agent


@pytest.mark.parametrize(
    ("paths", "names"),
    [(["their_tools.add"], ["add"]), (["their_tools.both"], ["add", "fail"]), (["their_tools"], ["own"])],
)
def test_tools_by_path(monkeypatch: pytest.MonkeyPatch, paths: list[str], names: list[str]) -> None:
    agent = configured(monkeypatch, *(word for path in paths for word in ("--react-tools", path)))
    assert list(agent.tools) == names


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--react-tools", "no_such.thing"], "--react-tools no_such.thing: No module named 'no_such'"),
        (
            ["--react-tools", "their_tools.ad"],
            "--react-tools their_tools.ad: module 'their_tools' has no attribute 'ad'",
        ),
        (["--react-tools", "their_tools.number"], "expected a function, a list of functions, or a module"),
        (["--react-tools", "their_tools.add", "--react-tools", "their_tools.both"], "two tools named add"),
        (["--react-max-turns", "0"], "--react-max-turns 0: expected 1 or more"),
    ],
)
def test_wrong_flags_are_named(monkeypatch: pytest.MonkeyPatch, words: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        configured(monkeypatch, *words)
    assert text in raised.value.message


def positional(a: int, /) -> None: ...
def stars(*a: int) -> None: ...
def unknown(a: NoSuchType) -> None: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize("function", [positional, stars, unknown])
def test_what_cannot_be_a_tool_is_named(function: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=f"--react-tools: {function.__name__} cannot be a tool"):
        ReactAgent([function])


def test_annotated_types_describe_arguments() -> None:
    def look(where: Annotated[str, Field(description="The place.")]) -> None:
        """Look."""

    (tool,) = ReactAgent([look]).tools.values()
    assert tool.spec["function"]["parameters"]["properties"] == {
        "where": {"type": "string", "description": "The place."}
    }


def test_no_paths_are_no_tools() -> None:
    assert load_tools([]) == []
