"""The public fake session server, with a model that knows the calculator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from miles_core.testing import fake_sessions
from miles_core.testing.fake_sessions import INSTANCE, Answer, FakeSession, Script, serving, serving_in_thread

__all__ = [
    "INSTANCE",
    "Answer",
    "FakeSession",
    "FakeSessions",
    "Script",
    "call",
    "say",
    "serving",
    "serving_in_thread",
    "solve",
]


def call(expression: str, *, number: int = 0) -> dict[str, Any]:
    """An assistant message that calls the calculator."""
    arguments = orjson.dumps({"expression": expression}).decode()
    return fake_sessions.call("calculator", arguments, reasoning=f"Compute {expression}.", number=number)


def say(content: str) -> dict[str, Any]:
    """An assistant message of text."""
    return fake_sessions.say(content, reasoning="So it is.")


def solve(request: dict[str, Any]) -> Answer:
    """Call the calculator with what follows `What is`, then answer with its result."""
    last = request["messages"][-1]
    if last["role"] == "tool":
        return say(f"The answer is {last['content']}.")
    return call(last["content"].removeprefix("What is ").removesuffix("?"))


@dataclass
class FakeSessions(fake_sessions.FakeSessions):
    """Solves what it is asked, unless it has another script."""

    script: Any = solve
