"""How model families write tool calls: each format reads the text of a call, whole, cut off or malformed.

A format is a frozen description; the parser (`parse.py`) finds a block by its opener and asks the format to read
what follows. Nothing is guessed: what is not well formed is a `Malformed`, and stays text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from miles_core.tito.arguments import ToolSchemas, duplicates, member_json, object_json, read_json, value_json


@dataclass(frozen=True)
class Call:
    """One call: the function's name, its arguments as JSON text, and the id where the model writes one."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True)
class Malformed:
    """Why a text is not a call."""

    reason: str


class Unfinished:
    """The text may still become a call: what looked like its end stands inside one of its values."""


Reading = Call | Malformed | Unfinished


class CallFormat(Protocol):
    """A way of writing calls.

    A block stands between `opener` and `closer`. It is one call, or, where `call_end` is given, any number of calls
    that each end with it. `tokens` are the texts that must be tokens of the checkpoint.
    """

    @property
    def opener(self) -> str: ...

    @property
    def closer(self) -> str: ...

    @property
    def call_end(self) -> str | None: ...

    @property
    def tokens(self) -> tuple[str, ...]: ...

    def read(self, text: str, schemas: ToolSchemas) -> Reading:
        """The call that `text` is: a block's inside, or with `call_end` a part of it that ends so."""
        ...


@dataclass(frozen=True, kw_only=True)
class JsonCalls:
    """`{"name": …, "arguments": {…}}` between two tags."""

    opener: str = "<tool_call>"
    closer: str = "</tool_call>"
    arguments_key: str = "arguments"
    call_end: None = None

    @property
    def tokens(self) -> tuple[str, ...]:
        """Both tags."""
        return (self.opener, self.closer)

    def read(self, text: str, schemas: ToolSchemas) -> Reading:
        """The call that JSON text says; arguments keep the spelling they were sampled with."""
        value, valid = read_json(text.strip())
        if not valid:
            return Unfinished() if in_json_string(text) else Malformed("it is not JSON")
        if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
            return Malformed("it names no function")
        arguments = value.get(self.arguments_key, {})
        if isinstance(arguments, str):
            return Call(value["name"], arguments)
        if not isinstance(arguments, dict):
            return Malformed("its arguments are not an object")
        return Call(value["name"], member_json(text, self.arguments_key) or "{}")


_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*(?P<end>")?', re.DOTALL)


def in_json_string(text: str) -> bool:
    """Whether a string of JSON text is still open at its end."""
    return any(string["end"] is None for string in _STRINGS.finditer(text))


@dataclass(frozen=True, kw_only=True)
class ElementCalls:
    """Calls as elements with one element a parameter, whose values stand bare.

    All patterns are regular expressions. `name` matches the start of a call and has a group `name`; `parameter` the
    start of a parameter with a group `name`, and `string` where the call itself says whether the value is one
    (`true`) or JSON (`false`). `parameter_end` and `end` are texts, `end` closes a call ("" where the block does).
    `around_value` is what the template writes on both sides of a value.
    """

    opener: str
    closer: str
    call_end: str | None = None
    name: str
    parameter: str
    parameter_end: str
    end: str
    around_value: str = ""
    python_literals: bool = False
    tokens: tuple[str, ...]

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
        over = rf"\s*{re.escape(self.end)}\s*\Z"
        behind = rf"{re.escape(self.parameter_end)}(?=\s*{self.parameter}|{over})"
        named = (rf"\s*{self.name}", rf"\s*{self.parameter}", over, _anonymous(behind))
        first, second, third, fourth = (re.compile(pattern, re.DOTALL) for pattern in named)
        return first, second, third, fourth

    def read(self, text: str, schemas: ToolSchemas) -> Reading:
        """The call that the elements say; a value ends where what follows it is part of the call again."""
        name, parameter, over, value_end = self._patterns
        head = name.match(text)
        if head is None:
            return Malformed("it names no function")
        function, at, members = head["name"], head.end(), list[tuple[str, str]]()
        while (start := parameter.match(text, at)) is not None:
            end = value_end.search(text, start.end())
            if end is None:
                return Unfinished()
            raw = text[start.end() : end.start()]
            if self._runs_over(raw):
                return Malformed("a parameter is not closed")
            value = self._value(raw, start, schemas.types_of(function, start["name"]))
            if isinstance(value, Malformed):
                return value
            members.append((start["name"], value))
            at = end.end()
        if over.match(text, at) is None:
            return Malformed("something stands between its parameters, or it is not closed")
        if (twice := duplicates([key for key, _ in members])) is not None:
            return Malformed(f"it gives the parameter {twice!r} twice")
        return Call(function, object_json(members))

    def _value(self, raw: str, start: re.Match[str], types: frozenset[str]) -> str | Malformed:
        text = raw.removeprefix(self.around_value).removesuffix(self.around_value) if self.around_value else raw
        says = start.groupdict().get("string")
        if says is None:
            return value_json(text, types, python_literals=self.python_literals)
        if says == "true":
            return value_json(text, frozenset({"string"}))
        if not read_json(text)[1]:
            return Malformed(f"the parameter {start['name']!r} is not the JSON that it says it is")
        return text.strip()

    def _runs_over(self, raw: str) -> bool:
        """Whether a value holds the end of this block and the beginning of another: a forgotten closing tag."""
        depth = 0
        for found in re.finditer(f"{re.escape(self.opener)}|{re.escape(self.closer)}", raw):
            if found[0] == self.opener:
                if depth < 0:
                    return True
                depth += 1
            else:
                depth -= 1
        return False


def _anonymous(pattern: str) -> str:
    """The pattern with its named groups unnamed, since a name may stand once only."""
    return re.sub(r"\(\?P<\w+>", "(?:", pattern)
