"""The calculator agent, with the real OpenAI client against a scripted session server."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from helpers.fake_sessions import FakeSession, FakeSessions, call, say, serving, solve
from miles_agents import calculator, chat
from miles_agents.calculator import CALCULATOR_TOOL, calculate, grade, run_agent
from miles_core.errors import ConfigError


async def work(fake: FakeSessions, *, label: str = "21", **kwargs: Any) -> dict[str, Any]:
    session = fake.sessions["s"] = FakeSession()
    prompt = [{"role": "user", "content": "What is 3 * 7?"}]
    async with serving(fake) as url:
        result = await run_agent(f"{url}/sessions/s", prompt, kwargs, {"label": label})
    assert prompt == [{"role": "user", "content": "What is 3 * 7?"}], "the prompt is the caller's"
    assert session.requests
    return result


async def test_solves_with_the_tool_and_is_rewarded() -> None:
    fake = FakeSessions()
    result = await work(fake, temperature=0.5, top_k=20, max_tokens=9)
    assert (result["reward"], result["turns"]) == (1.0, 2)
    assert 0 <= result["agent_metrics"]["total_tool_time"] < 1
    first, second = fake.sessions["s"].requests
    assert first["tools"] == [CALCULATOR_TOOL]
    assert (first["temperature"], first["top_k"], first["max_tokens"]) == (0.5, 20, 9)
    assert second["messages"][0] == first["messages"][0]
    assert second["messages"][2] == {"role": "tool", "tool_call_id": "call_0", "content": "21"}


async def test_replays_the_assistant_message_as_received() -> None:
    fake = FakeSessions()
    await work(fake)
    assert fake.sessions["s"].requests[1]["messages"][1] == call("3 * 7")


async def test_a_wrong_label_gives_no_reward() -> None:
    assert (await work(FakeSessions(), label="22"))["reward"] == 0.0


async def test_stops_after_eight_turns() -> None:
    result = await work(FakeSessions(script=lambda request: call("1 + 1")))
    assert (result["reward"], result["turns"]) == (0.0, 8)


@pytest.mark.parametrize("arguments", ["{1", "[" * 9999], ids=["cut off", "deep"])
async def test_an_unknown_tool_and_broken_arguments_are_answered(arguments: str) -> None:
    broken = call("1")
    broken["tool_calls"][0]["function"]["arguments"] = arguments
    other = call("1")
    other["tool_calls"][0]["function"]["name"] = "search"
    script = iter([broken, other, say("I give up.")])
    fake = FakeSessions(script=lambda request: next(script))
    await work(fake)
    sent = fake.sessions["s"].requests[2]["messages"]
    assert sent[2]["content"] == "error: the arguments are not JSON"
    assert sent[4]["content"] == "error: no tool is named search"


async def test_an_engine_error_is_raised() -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as raised:
        await work(FakeSessions(script=lambda request: 400))
    assert raised.value.body == "scripted 400"


async def test_the_key_comes_from_the_metadata_or_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    client: Callable[..., Any] = chat.client_of

    def spy(base_url: str, api_key: str, *, agent: str) -> Any:
        seen.append(api_key)
        return client(base_url, api_key, agent=agent)

    monkeypatch.setattr(chat, "client_of", spy)
    fake = FakeSessions()
    fake.sessions["s"] = FakeSession()
    async with serving(fake) as url:
        prompt = [{"role": "user", "content": "What is 1?"}]
        await run_agent(f"{url}/sessions/s", prompt, {}, {})
        await run_agent(f"{url}/sessions/s", prompt, {}, {"session_api_key": "k"})
        await run_agent(f"{url}/sessions/s", prompt, {}, {}, api_key="a")
    assert seen == ["EMPTY", "k", "a"]


async def test_without_openai_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ConfigError) as raised:
        await run_agent("http://x", [], {}, {})
    assert raised.value.message == "the calculator agent needs openai: pip install 'miles-plugins[agents]'"


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        (" (1 - 4) * -2 ", "6"),
        ("--5", "5"),
        ("1 / 2", "error: only integers with + - * and brackets"),
        ("2 ** 9", "error: only integers with + - * and brackets"),
        ("1.5", "error: only integers with + - * and brackets"),
        ("True", "error: only integers with + - * and brackets"),
        ("__import__('os')", "error: only integers with + - * and brackets"),
        ("1+" * 600 + "1", "error: longer than 1000 characters"),
        ("*".join(["9" * 90] * 11), str((10**90 - 1) ** 11)),
        ("*".join(["9" * 100] * 9) + "*" + "9" * 80, str((10**100 - 1) ** 9 * (10**80 - 1))),
    ],
)
def test_calculate(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize("expression", ["", "1 +", "1 2", "\x00", "(" * 500, "-" * 999 + "1", "٣+"])
def test_calculate_never_raises(expression: str) -> None:
    assert calculate(expression).startswith("error: ") or expression.startswith("-")


def test_a_number_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calculator, "MAX_BITS", 16)
    assert calculate("999 * 999") == "error: the number is too large"


@pytest.mark.parametrize(
    ("message", "label", "reward"),
    [
        (say("The answer is 12."), "12", 1.0),
        (say("The answer is 12."), 12, 1.0),
        (say("The answer is -3."), "-3", 1.0),
        (say("First: The answer is 1. No: The answer is 2."), "2", 1.0),
        (say("The answer is 12"), "12", 0.0),
        (say("12."), "12", 0.0),
        (say("The answer is 12."), None, 0.0),
        (call("1"), "1", 0.0),
        ({"role": "tool", "content": "The answer is 1."}, "1", 0.0),
        ({"role": "assistant", "content": None}, "1", 0.0),
    ],
)
def test_grade(message: dict[str, Any], label: object, reward: float) -> None:
    assert grade(message, label) == reward


def test_the_script_helper_solves() -> None:
    assert solve({"messages": [{"role": "tool", "content": "4"}]}) == say("The answer is 4.")
