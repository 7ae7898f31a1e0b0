"""Conversations as strange as JSON allows, and what of them a format must write.

Every text carries a marker of its own (`w12q`), so that a test can say which one was lost. No text holds a quote, or a
word that Python spells its values with, so that such a thing in a prompt is a Python value that leaked.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

from miles_core.types import Message

MARKER = re.compile(r"w\d+q")
PYTHON = re.compile(r"\{'|\['|': |, '|\b(?:True|False|None)\b|Undefined|Namespace|object at 0x|\b(?:nan|inf)\b")
"""How Python spells what JSON spells otherwise."""

AROUND = (
    "",
    " ",
    "\n",
    "  \n\n",
    "\t",
    "\r\n",
    "数 🙂",
    "é\u0301",
    "\x00",
    "\u2028",
    "{",
    '{"a": 1}',
    "\\",
    "%s {{ x }}",
)
CONTROL = (
    "<|im_start|>", "<|im_end|>", "<|im_middle|>", "<|user|>", "<|observation|>", "[e~[", "]~b]ai", "<｜User｜>",
    "<｜end▁of▁sentence｜>", "<|end_message|>", "<|content_text|>", "<tool_call>", "</tool_call>", "<tool_response>",
    "<arg_key>", "</parameter>", "<｜DSML｜invoke>", "<|tool_calls_section_end|>", "<think>", "</think>",
)  # fmt: skip
SCALARS = (0, -1, 1.5, 1e-7, 1e300, 2**63, 10**30, True, False, None)
ODD_ARGUMENTS: tuple[Any, ...] = (
    None, "", " ", [], [1, None, {"a": True}], 5, 1.5, True, "[1, 2]", '{"a": ', "null", "12", '"{\\"a\\": 1}"',
    '{"a": NaN}', '{"a": 1, "a": 2}', '{"a": "\\ud800"}', '{"a": 1e999}', f'{{"a": {10**30}}}', '  {"a": {"b": [1]}}  ',
)  # fmt: skip


class Maker:
    """Makes up parts of one conversation, the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._numbers = itertools.count()

    def one(self, *choices: Any) -> Any:
        return self._random.choice(choices)

    def often(self) -> bool:
        return self._random.random() < 0.75

    def seldom(self) -> bool:
        return not self.often()

    def text(self) -> str:
        """Text with a marker, now and then with a control token or white space around it."""
        control = self.one(*CONTROL) if self.seldom() else ""
        return f"{self.one(*AROUND)}{control}w{next(self._numbers)}q{self.one(*AROUND)}"

    def value(self, depth: int = 0) -> Any:
        kind = self.one("text", "text", "scalar", "list", "object") if depth < 3 else "text"
        if kind == "text":
            return self.text()
        if kind == "scalar":
            return self.one(*SCALARS)
        size = range(self.one(0, 1, 2))
        return [self.value(depth + 1) for _ in size] if kind == "list" else self.object(depth + 1)

    def object(self, depth: int = 0) -> dict[str, Any]:
        return {self.text(): self.value(depth) for _ in range(self.one(0, 1, 2))}

    # -- messages ----------------------------------------------------------------------------------------------

    def content(self) -> Any:
        if self.often():
            return self.text()
        if self.seldom():
            return self.one(None, "", [])
        return [self.part() for _ in range(self.one(1, 2, 3))]

    def part(self) -> Any:
        text = self.text()
        more = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
        return self.one(
            {"type": "text", "text": text}, {"type": "input_text", "text": text}, {"text": text}, text, more
        )

    def call(self, number: int) -> dict[str, Any]:
        call: dict[str, Any] = {"id": f"functions.f:{number}", "type": "function", "index": number}
        arguments = self.one(self.object(), json.dumps(self.object()), self.text(), self.one(*ODD_ARGUMENTS))
        call["function"] = {"name": self.one("f", "", "f.g-h", self.text()), "arguments": arguments}
        for key in ("id", "type", "index"):
            if self.seldom():
                call.pop(key)
        return call

    def assistant(self) -> Message:
        message: Message = {"role": "assistant", "content": self.content()}
        if self.often():
            message["reasoning_content"] = self.one(None, "", " \n", self.text(), self.text())
        message["tool_calls"] = [self.call(n) for n in range(self.one(0, 0, 1, 2))] or self.one(None, [])
        return message

    def results(self, message: Message) -> list[Message]:
        """A result for each call of an assistant's message."""
        calls = message.get("tool_calls") or []
        return [{**self.result(), "tool_call_id": call.get("id") or "none"} for call in calls]

    def result(self) -> Message:
        message: Message = {"role": "tool", "content": self.content()}
        if self.often():
            message["tool_call_id"] = self.one("functions.f:0", "other", None)
        if self.seldom():
            message["name"] = self.one("f", None)
        return message

    def user(self) -> Message:
        return {"role": "user", "content": self.content(), **({"name": self.one("bob", None)} if self.seldom() else {})}

    def system(self) -> Message:
        return {"role": "system", "content": self.content()}

    # -- tools -------------------------------------------------------------------------------------------------

    def schema(self, depth: int = 0) -> Any:
        inner = self.schema(depth + 1) if depth < 2 else True
        return self.one(
            {"type": "string", "description": self.text()},
            {"type": ["integer", "null"], "default": None, "minimum": -1.5},
            {"type": "array", "items": inner, "description": None},
            {"type": "object", "properties": {self.text(): inner}, "required": self.one([], ["x"], None, "x")},
            {"anyOf": [inner, {"type": "null"}]},
            {"enum": [1, "a", None, True]},
            {"$ref": "#/$defs/A"},
            {"type": self.one(None, 5, {"a": None}, [{"a": True}])},
            self.one({}, True, None, [], 5, "string"),
        )

    def tool(self) -> dict[str, Any]:
        parameters = self.one(
            {"type": "object", "properties": {self.text(): self.schema(), "x": self.schema()}, "required": ["x"]},
            {"type": "object", "properties": {"x": self.schema()}, "$defs": {"A": {"type": "string"}}, "x-extra": [1]},
            {"type": "object", "properties": {}, "additionalProperties": False},
            self.one(None, {}, [], 5, "text", {"properties": [1]}, {"properties": None}),
        )
        function = {"name": self.one("f", self.text()), "description": self.one(self.text(), None, ""),
                    "parameters": parameters}  # fmt: skip
        if self.seldom():
            function["strict"] = self.one(True, False, None)
        if self.seldom():
            function.pop(self.one("description", "parameters"))
        if self.seldom():
            return function
        return {"type": "function", "function": function, **({"extra": self.one(1, None)} if self.seldom() else {})}


def markers(value: Any) -> set[str]:
    """Every marker in a JSON value; in the keys too."""
    if isinstance(value, str):
        return set(MARKER.findall(value))
    if isinstance(value, dict):
        return set().union(*map(markers, value), *map(markers, value.values()))
    return set().union(*map(markers, value)) if isinstance(value, list) else set()
