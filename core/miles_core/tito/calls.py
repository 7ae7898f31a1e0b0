"""How model families write tool calls: each format reads the text of a call, whole, cut off or malformed.

A format is a frozen description; the parser (`parse.py`) finds a block by its opener, and has a reader of the format
look at what follows each time that something which may end the call has come. Nothing is guessed: what is not well
formed is a `Malformed`, and stays text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from miles_core.tito.arguments import ToolSchemas, duplicates, members_json, read_json
from miles_core.tito.json_text import JSON_SPACE, JsonText


@dataclass(frozen=True)
class Call:
    """One call: the function's name, its arguments as JSON text, and the id where the model writes one."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True)
class Malformed:
    """Why a text is not a call; its first `at` characters surely belong to what is broken, and reading goes on there.

    So a well-formed call that follows is found, and one that a value of the broken call quotes is not.
    """

    reason: str
    at: int = 0


@dataclass(frozen=True)
class Unfinished:
    """The text may still become a call: what looked like its end stands inside one of its values.

    If nothing more comes, it is cut off, and reading goes on after its first `at` characters. None where the text does
    not tell what is value and what follows: then only whole calls at the very end are calls.
    """

    at: int | None = None


Reading = Call | Malformed | Unfinished


class CallReader(Protocol):
    """Reads one call."""

    def read(self, text: str) -> Reading:
        """The call that `text` is, from the opener (or `call_start`) through something that may end it.

        Called again with a longer text as long as it is `Unfinished`.
        """
        ...


class CallFormat(Protocol):
    """A way of writing calls.

    A block stands between `opener` and `closer`. It is one call; or, where `call_start` and `call_ends` are given, any
    number of calls that begin with the one and end with one of the others, with white space around. `tokens` are the
    texts that must be tokens of the checkpoint.
    """

    @property
    def opener(self) -> str: ...

    @property
    def closer(self) -> str: ...

    @property
    def call_start(self) -> str | None: ...

    @property
    def call_ends(self) -> tuple[str, ...]: ...

    @property
    def tokens(self) -> tuple[str, ...]: ...

    def reader(self, schemas: ToolSchemas) -> CallReader:
        """A reader of one call. Its text is a block behind the opener, with the closer; where calls have a start and
        ends of their own, from the start (white space before it) through an end, or through the closer."""
        ...


@dataclass(frozen=True, kw_only=True)
class JsonCalls:
    """`{"name": …, "arguments": {…}}` between two tags."""

    opener: str = "<tool_call>"
    closer: str = "</tool_call>"
    arguments_key: str = "arguments"
    call_start: None = None
    call_ends: tuple[str, ...] = ()

    @property
    def tokens(self) -> tuple[str, ...]:
        """Both tags."""
        return (self.opener, self.closer)

    def reader(self, schemas: ToolSchemas) -> CallReader:
        """A reader of a block's JSON."""
        return _JsonReader(self)


class _JsonReader:
    """Reads one block of JSON; arguments keep the spelling they were sampled with."""

    def __init__(self, format_: JsonCalls) -> None:
        self._format = format_
        self._json = JsonText(0)
        self._first_end = 0

    def read(self, text: str) -> Reading:
        end = len(text) - len(self._format.closer)
        self._first_end = self._first_end or len(text)
        found = self._json.read(text, end)
        if found is None:
            return Unfinished(self._first_end)
        value, valid = found
        if not valid:
            return Malformed("it is not JSON")
        if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
            return Malformed("it names no function", end)
        return self._call(value["name"], text[:end])

    def _call(self, name: str, text: str) -> Reading:
        members = members_json(text)
        keys = [key for key, _ in members]
        if (twice := duplicates(keys)) is not None:
            return Malformed(f"it gives {twice!r} twice", len(text))
        expected = ("name", self._format.arguments_key)
        if (other := next((key for key in keys if key not in expected), None)) is not None:
            return Malformed(f"it has {other!r} beside {' and '.join(map(repr, expected))}", len(text))
        arguments = dict(members).get(self._format.arguments_key, "{}")
        value, _ = read_json(arguments)
        if isinstance(value, str):  # the object, written as a string once more
            arguments, (value, _) = value, read_json(value)
        if not isinstance(value, dict):
            return Malformed("its arguments are not an object", len(text))
        return Call(name, arguments.strip(JSON_SPACE))
