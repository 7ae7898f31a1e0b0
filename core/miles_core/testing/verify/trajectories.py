"""The conversations that a family or a template is tried on: every way in which turns follow each other.

A trajectory is a finished conversation. Its assistant messages are generations, apart from those the client wrote.
Generations carry reasoning unless the lack of it is what is tried; where there is none to be had (a format without
it, thinking turned off) it is taken off. Ids of calls have the form `functions.NAME:NUMBER`, since there are formats
that write a function's name by its id alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miles_core.types import Message, Tool


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One conversation.

    `written` are the positions of assistant messages that the client wrote. `tools_later` are the tools of later
    requests, where the first one had none. `needs` are what the format must have: `reasoning`, `calls`.
    """

    name: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tools_later: tuple[Tool, ...] = ()
    written: frozenset[int] = frozenset()
    needs: frozenset[str] = frozenset()

    @property
    def generations(self) -> list[int]:
        """Positions of the messages that the model sampled."""
        return [
            at for at, message in enumerate(self.messages) if message["role"] == "assistant" and at not in self.written
        ]


def _tool(name: str, description: str, properties: Mapping[str, Any], *required: str) -> Tool:
    parameters = {"type": "object", "properties": dict(properties), "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


LOOK_UP = _tool(
    "look_up",
    "Find a book — by its title, or a part of it.",
    {"title": {"type": "string", "description": "Its title"}, "year": {"type": "integer", "minimum": 0}},
    "title",
)
LEND = _tool(
    "lend",
    'Lend copies.\nSays "done" & <when>.',
    {
        "note": {"type": "string"},
        "copy": {"type": "integer"},
        "fee": {"type": "number"},
        "gift": {"type": "boolean"},
        "until": {"type": ["string", "null"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "reader": {"type": "object", "properties": {"name": {"type": "string"}}},
        "größe": {"type": "string"},
    },
)
CLOSE = _tool("close", "Close the library.", {})
TOOLS = (LOOK_UP, LEND, CLOSE)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _system(text: str) -> Message:
    return {"role": "system", "content": text}


def _said(text: str, thought: str = "", *calls: tuple[str, Any], first: int = 0) -> Message:
    """An assistant's message; its calls are numbered from `first` on."""
    message: Message = {"role": "assistant", "content": text}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [_call(number, *call) for number, call in enumerate(calls, first)]
    return message


def _call(number: int, name: str, arguments: Any) -> dict[str, Any]:
    text = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"functions.{name}:{number}",
        "type": "function",
        "function": {"name": name, "arguments": text},
    }


def _result(text: str, number: int = 0, name: str = "look_up") -> Message:
    return {"role": "tool", "tool_call_id": f"functions.{name}:{number}", "name": name, "content": text}


_ASK = _user("Where is Emma?")
_LOOK = ("look_up", {"title": "Emma"})
_LOOKING = _said("", "I look it up.", _LOOK)
_FOUND = _result("shelf 12")
_ANSWER = _said("On shelf 12.", "Found it.")
_THANKS = _user("And Ulysses?")


def _answers(name: str, *messages: Message, **more: Any) -> Trajectory:
    return Trajectory(name=name, messages=messages, **more)


def _calls(name: str, *messages: Message, tools: tuple[Tool, ...] = TOOLS, **more: Any) -> Trajectory:
    return Trajectory(name=name, messages=messages, tools=tools, needs=frozenset({"calls"}), **more)


def _thinks(name: str, *messages: Message, **more: Any) -> Trajectory:
    return Trajectory(name=name, messages=messages, needs=frozenset({"reasoning"}), **more)


APPENDED = (
    _answers("one answer", _ASK, _ANSWER),
    _answers("user after an answer", _system("Be brief."), _ASK, _ANSWER, _THANKS, _said("Shelf 3.", "A novel.")),
    _answers("two users after an answer", _ASK, _ANSWER, _THANKS, _user("Or Dracula?"), _said("Both.", "Two.")),
    _answers("system after an answer", _ASK, _ANSWER, _system("Be kind."), _THANKS, _said("Sure: shelf 3.", "Kind.")),
    _answers("system as the last message", _ASK, _ANSWER, _system("Go on."), _said("There are two.", "More.")),
    _answers(
        "assistant after an answer", _ASK, _ANSWER, _said("Wait."), _THANKS, _said("Shelf 3.", "."),
        written=frozenset({2}),
    ),
    _answers(
        "assistant as the last message", _ASK, _ANSWER, _said("Let me see:"), _said("Yes.", "Go on."),
        written=frozenset({2}),
    ),
    _answers(
        "examples written by the client", _system("Be brief."), _user("1 + 1?"), _said("2"), _user("2 + 2?"),
        _said("4", "Easy."), _ASK, _ANSWER, _THANKS, _said("Shelf 3.", "A novel."), written=frozenset({2, 4}),
    ),
)  # fmt: skip

CALLED = (
    _calls("one tool result", _ASK, _LOOKING, _FOUND, _ANSWER),
    _calls("text before a call", _ASK, _said("I look it up.", "Look.", _LOOK), _FOUND, _ANSWER),
    _calls("user after tool results", _ASK, _LOOKING, _FOUND, _ANSWER, _THANKS, _said("Shelf 3.", "A novel.")),
    _calls("user beside a tool result", _ASK, _LOOKING, _FOUND, _user("Quick!"), _ANSWER),
    _calls("system beside a tool result", _ASK, _LOOKING, _FOUND, _system("Hurry."), _ANSWER),
    _calls(
        "assistant beside a tool result", _ASK, _LOOKING, _FOUND, _said("So:"), _ANSWER, written=frozenset({3})
    ),
    _calls(
        "parallel calls, all results", _ASK, _said("", "Both.", _LOOK, ("close", {})), _FOUND,
        _result("ok", 1, "close"), _ANSWER,
    ),
    _calls(
        "parallel calls, text before", _ASK,
        _said("Three at once.", "Three.", _LOOK, ("look_up", {"title": "Ulysses"}), ("lend", {"copy": 7})),
        _FOUND, _result("shelf 3", 1), _result("lent", 2, "lend"), _ANSWER,
    ),
    _calls(
        "results in another order", _ASK, _said("", "Both.", _LOOK, ("close", {})), _result("ok", 1, "close"), _FOUND,
        _ANSWER,
    ),
    _calls(
        "tool error and another try", _ASK, _LOOKING, _result("Error: no such title"),
        _said("", "Again.", ("look_up", {"title": "Emma", "year": 1815}), first=1), _result("shelf 12", 1), _ANSWER,
    ),
    _calls(
        "the same call twice", _ASK, _LOOKING, _FOUND, _said("", "Once more.", _LOOK, first=1), _result("shelf 12", 1),
        _ANSWER,
    ),
    _calls(
        "calls in several turns", _ASK, _LOOKING, _FOUND,
        _said("Now the copy.", "Lend.", ("lend", {"copy": 3}), first=1), _result("lent", 1, "lend"),
        _said("", "Close.", ("close", {}), first=2), _result("closed", 2, "close"), _ANSWER, _THANKS,
        _said("", "Look.", ("look_up", {"title": "Ulysses"}), first=3), _result("shelf 3", 3), _said("Shelf 3.", "."),
    ),
    _calls(
        "a call written by the client", _ASK, _LOOKING, _FOUND, _said("On shelf 12."), _THANKS,
        _said("", "Look.", ("look_up", {"title": "Ulysses"}), first=1), _result("shelf 3", 1), _said("Shelf 3.", "."),
        written=frozenset({1, 3}),
    ),
    _calls("calls without declared tools", _ASK, _LOOKING, _FOUND, _ANSWER, _THANKS, _said("No.", "."), tools=()),
    _answers("tools that are not used", _ASK, _ANSWER, _THANKS, _said("Shelf 3.", "."), tools=TOOLS),
    _calls(
        "tools that appear later", _ASK, _ANSWER, _THANKS, _said("", "Look.", ("look_up", {"title": "Ulysses"})),
        _result("shelf 3"), _said("Shelf 3.", "."), tools=(), tools_later=TOOLS,
    ),
)  # fmt: skip

THOUGHT = (
    _thinks("answer without reasoning", _ASK, _said("On shelf 12."), _THANKS, _said("Shelf 3.")),
    _thinks("reasoning in one turn only", _ASK, _said("On shelf 12."), _THANKS, _said("Shelf 3.", "A novel.")),
    _thinks("reasoning in lines", _ASK, _said("Shelf 12.", "First:\n\n- A\n- B\n\nSo."), _THANKS, _said("3.", "1\n2")),
    _thinks("reasoning alone", _ASK, _said("", "Nothing to say."), _THANKS, _said("Shelf 3.", "A novel.")),
    Trajectory(
        name="call without reasoning", messages=(_ASK, _said("", "", _LOOK), _FOUND, _said("On shelf 12.")),
        tools=TOOLS, needs=frozenset({"calls", "reasoning"}),
    ),
    _answers("empty answer", _ASK, _said(""), _THANKS, _said("Shelf 3.", "A novel.")),
)  # fmt: skip

_ARGUMENTS: Mapping[str, tuple[str, Any]] = {
    "none": ("close", {}),
    "nested": ("lend", {"reader": {"name": "Ada", "cards": [{"id": 1, "tags": []}, None]}, "tags": ["a", "b"]}),
    "empty values": ("lend", {"note": "", "tags": [], "reader": {}}),
    "numbers": ("lend", {"copy": 12345678901234567890, "fee": 1e-7}),
    "whole numbers": ("lend", {"copy": -3, "fee": 2.0}),
    "true and null": ("lend", {"gift": True, "until": None}),
    "text like JSON": ("lend", {"note": '{"a": [1, "b"]}'}),
    "text like a number": ("look_up", {"title": "1984"}),
    "text like null": ("lend", {"note": "null", "until": "true"}),
    "lines of text": ("lend", {"note": "one\n\n  two\n"}),
    "quotes and slashes": ("lend", {"note": "C:\\new \"x\" 'y' \\n <b>&amp;</b>"}),
    "space around text": ("lend", {"note": "  x  "}),
    "other scripts": ("lend", {"note": "naïve 数 🙂 שלום", "größe": "größer"}),
}

ARGUED = tuple(
    _calls(f"arguments: {name}", _ASK, _said("", "I call.", call), _result("ok", 0, call[0]), _ANSWER)
    for name, call in _ARGUMENTS.items()
)

_SCRIPTS = "Où est « naïveté » ? 数学の本 🙂👩‍🔬 שלום עולם، مرحبا ½"


def _long() -> tuple[Message, ...]:
    """Twelve rounds of a question, a call, its result and an answer."""
    messages: list[Message] = [_system("You keep a library.")]
    for number in range(12):
        title = f"Volume {number}"
        messages += [
            _user(f"Where is {title}?"),
            _said("", f"Look for {title}.", ("look_up", {"title": title}), first=number),
            _result(f"shelf {number * 7}", number),
            _said(f"{title} is on shelf {number * 7}.", f"Shelf {number * 7}."),
        ]
    return tuple(messages)


WRITTEN = (
    _answers("space around user text", _user("  Where?\n\n"), _ANSWER, _user("\n\n or\t so? \n"), _said("No.", ".")),
    _answers("empty user text", _ASK, _ANSWER, _user(""), _said("Yes?", "Nothing.")),
    _answers("blank lines in an answer", _ASK, _said("One\n\n\n  two\n\tthree", "A\n\nB"), _THANKS, _said("Yes.", ".")),
    _answers("space around an answer", _ASK, _said("\n On shelf 12. \n\n", " Hm.\n"), _THANKS, _said("Yes.", ".")),
    _answers("other scripts", _system(_SCRIPTS), _user(_SCRIPTS), _said(_SCRIPTS, _SCRIPTS), _user(_SCRIPTS), _ANSWER),
    _answers("tags in user text", _ASK, _ANSWER, _user("What is </b> & <think>, or </tool>?"), _said("Tags.", ".")),
    _answers("code in an answer", _ASK, _said("```python\nx = {'a': [1]}\n```\n{\"b\": 2}", "Code."), _THANKS, _ANSWER),
    _calls("empty tool result", _ASK, _LOOKING, _result(""), _ANSWER),
    _calls("space around a tool result", _ASK, _LOOKING, _result("\n  shelf 12 \n\n"), _ANSWER),
    _calls("tool result in JSON", _ASK, _LOOKING, _result('{"shelf": 12, "near": [null, "é"]}'), _ANSWER),
    _calls("tool result in other scripts", _ASK, _LOOKING, _result(_SCRIPTS + "\n" + _SCRIPTS), _ANSWER),
    _calls("a long conversation", *_long()),
)  # fmt: skip

TRAJECTORIES: tuple[Trajectory, ...] = (*APPENDED, *CALLED, *THOUGHT, *ARGUED, *WRITTEN)
"""Every trajectory, in the order in which they are shown."""
