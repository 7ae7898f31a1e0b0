"""Calls as elements with one element a parameter, whose values stand bare: any text, tags of calls included."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from miles_core.tito.arguments import ANY, ToolSchemas, Types, duplicates, object_json, read_json, value_json
from miles_core.tito.calls import Call, CallReader, Malformed, Reading, Unfinished
from miles_core.tito.json_text import JSON_SPACE, JsonText


@dataclass(frozen=True, kw_only=True)
class ElementCalls:
    """Calls as elements with one element a parameter, whose values stand bare.

    `name` and `parameter` are regular expressions: `name` matches the start of a call and has a group `name`;
    `parameter` the start of a parameter with a group `name`, and `string` where the call itself says whether the value
    is one (`true`) or JSON (`false`). `parameter_end` and `end` are texts; `end` closes a call ("" where the block
    does). `empty` (a regular expression with a group `name`) is another form of a call without parameters. `between`
    is what the template writes between two tags, `around_value` on both sides of a value. `damaged` is a regular
    expression of what may be left of a parameter's opening tag, where one is due.
    """

    opener: str
    closer: str
    call_start: str | None = None
    call_ends: tuple[str, ...] = ()
    name: str
    parameter: str
    parameter_end: str
    end: str
    empty: str | None = None
    between: str = "\n"
    around_value: str = ""
    damaged: str | None = None
    python_literals: bool = False
    tokens: tuple[str, ...]

    def reader(self, schemas: ToolSchemas) -> CallReader:
        """A reader of one call."""
        return _ElementReader(self, schemas)

    @cached_property
    def patterns(self) -> _Patterns:
        """The format's regular expressions, compiled."""
        return _Patterns(self)


class _Patterns:
    """Regular expressions of a format: where the parts of a call begin and end."""

    def __init__(self, format_: ElementCalls) -> None:
        ends = [text for text in (format_.end, "" if format_.call_ends else format_.closer) if text]
        self.ends = (ends[0], format_.closer)  # what may end a call that has parameters, or its block
        parameter, end = _anonymous(format_.parameter), re.escape(ends[0])
        self.name = _compiled(rf"\s*{format_.name}")
        self.empty = _compiled(rf"\s*{format_.empty}\Z" if format_.empty else r"(?!)")
        self.parameter = _compiled(rf"\s*{format_.parameter}")
        self.over = _compiled(r"\s*" + r"\s*".join(map(re.escape, ends)) + r"\Z")
        # A call that stands in a value. Prose and pieces of tags are none: it has to begin just as the template
        # writes it, and what follows has to belong to a call.
        between = re.escape(format_.between)
        wrapped = rf"(?:{re.escape(format_.opener)}{between})" + ("?" if format_.name.startswith("<") else "")
        begin = rf"(?P<begin>{wrapped}{_anonymous(format_.name)}(?={between}{parameter}|\s*{end}))"
        close = rf"(?P<end>{end})|(?P<close>{re.escape(format_.closer)})"
        self.in_value = _compiled(
            rf"(?P<over>{re.escape(format_.parameter_end)})|{begin}|(?P<start>{parameter})|{close}"
        )
        self.damaged = _compiled(rf"\s*(?:{format_.damaged})" if format_.damaged else r"(?!)")
        self.behind_break = _compiled(rf"(?P<start>{parameter})|{begin}|{close}")


def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)


def _anonymous(pattern: str) -> str:
    """The pattern with its named groups unnamed, since a name may stand once only."""
    return re.sub(r"\(\?P<\w+>", "(?:", pattern)


class _ElementReader:
    """Reads one call.

    A value that is JSON, as its schema or the call itself says, ends outside of JSON's strings. Any value ends at the
    parameter's closing tag, if what follows is part of the call again: a parameter, or its end. So a value may hold
    closing tags. It may hold whole calls as well: between the beginning and the end of one, nothing
    ends the value. What looks like the end of the call and then like the beginning of another, like the rest of a
    parameter's tag, or like another parameter that the tool has and the call does not give, says that tags are missing.
    """

    def __init__(self, format_: ElementCalls, schemas: ToolSchemas) -> None:
        self._format = format_
        self._patterns = format_.patterns
        self._schemas = schemas
        self._function: str | None = None
        self._members: list[tuple[str, str]] = []
        self._at = 0  # up to where the text is read
        self._value: _Value | None = None  # the one that is being read
        self._wrong: str | None = None
        self._seen_in_values: list[str] = []  # parameters of the tool whose opening tags stand in values

    def read(self, text: str) -> Reading:
        if self._function is None:
            if (empty := self._patterns.empty.match(text)) is not None:
                return Call(empty["name"], "{}")
            head = self._patterns.name.match(text)
            if head is None:
                return Malformed("it names no function")
            self._function, self._at = head["name"], head.end()
        while self._value is not None or self._patterns.over.match(text, self._at) is None:
            if self._value is None and not self._next_parameter(text):
                return self._break_off(text)
            reading = self._read_value(text)
            if reading is not None:
                return reading
        wrong = self._wrong or self._wrong_names()
        return Call(self._function, object_json(self._members)) if wrong is None else Malformed(wrong, len(text))

    def _wrong_names(self) -> str | None:
        """What is wrong with a call whose parts are right: a parameter twice, or one that stands in another's value."""
        names = [key for key, _ in self._members]
        if (twice := duplicates(names)) is not None:
            return f"it gives the parameter {twice!r} twice"
        inside = next((name for name in self._seen_in_values if name not in names), None)
        return None if inside is None else f"the parameter before {inside!r} is not closed"

    def _next_parameter(self, text: str) -> bool:
        """Begin the value of the parameter that comes next."""
        start = self._patterns.parameter.match(text, self._at)
        if start is None:
            return False
        says = start.groupdict().get("string")
        assert self._function is not None
        types = self._schemas.types_of(self._function, start["name"]) if says is None else _SAID[says]
        self._value = _Value(start["name"], types, says is not None, start.end())
        return True

    def _read_value(self, text: str) -> Unfinished | Malformed | None:
        """Read on in a value; None when it has ended."""
        value = self._value
        assert value is not None
        end = self._end_of(value, text) if text.endswith(self._patterns.ends) else None
        if end is None:
            return Unfinished()
        if value.broken_at is not None:
            return Malformed("a parameter is not closed", value.broken_at)
        json = self._json_of(value, text[value.start : end])
        if json is None:
            self._wrong = self._wrong or f"the parameter {value.name!r} is not the JSON that it says it is"
        else:
            self._members.append((value.name, json))
        self._at, self._value = end + len(self._format.parameter_end), None
        return None

    def _end_of(self, value: _Value, text: str) -> int | None:
        """Where a value ends; None if not in this text. A missing closing tag shows in `broken_at`."""
        for mark in self._patterns.in_value.finditer(text, value.seen):
            value.seen = mark.end()
            kind = mark.lastgroup
            if value.json is not None and value.json.read(text, mark.start()) is None:
                continue
            if kind == "begin":
                if value.call_over is not None:
                    value.broken_at = value.call_over
                    return mark.start()
                value.first_call = value.first_call or mark.start()
                value.depth += 1
            elif kind == "end" and value.depth:
                value.depth -= 1
                value.inner_end = mark.end()
            elif kind in ("end", "close") and not value.depth:
                # A quoted block ends with its closer behind its call's end.
                if kind == "end" or value.inner_end is None or text[value.inner_end : mark.start()].strip():
                    value.call_over = mark.end()
            elif kind == "start" and not value.depth:
                self._note_parameter(text, mark)
            elif kind == "over" and not value.depth:
                if self._patterns.damaged.match(text, mark.end()) and not self._goes_on(text, mark.end()):
                    value.broken_at = mark.end()
                if value.broken_at is not None or self._goes_on(text, mark.end()):
                    return mark.start()
        return None

    def _goes_on(self, text: str, at: int) -> bool:
        """Whether what stands here is part of the call: another parameter, or its end."""
        patterns = self._patterns
        return patterns.parameter.match(text, at) is not None or patterns.over.match(text, at) is not None

    def _note_parameter(self, text: str, mark: re.Match[str]) -> None:
        """A value holds what looks like a parameter's opening tag: note one that the tool has, as it is written."""
        found = self._patterns.parameter.match(text, mark.start())
        before, behind = self._format.between, self._format.around_value
        if found is None or not (text.endswith(before, 0, mark.start()) and text.startswith(behind, found.end())):
            return
        if self._function is not None and self._schemas.declares(self._function, found["name"]):
            self._seen_in_values.append(found["name"])

    def _break_off(self, text: str) -> Malformed:
        """Neither a parameter nor the end is next: where does what is broken end?

        Parameters that follow belong to it, and whatever they quote; a call that begins does not.
        """
        reason = self._wrong or "something stands between its parameters, or it is not closed"
        while (mark := self._patterns.behind_break.search(text, self._at)) is not None and mark.lastgroup == "start":
            self._at = mark.start()
            self._next_parameter(text)
            value = self._value
            assert value is not None
            end = self._end_of(value, text)
            if end is None or value.broken_at is not None:
                return Malformed(reason, value.broken_at or value.first_call or len(text))
            self._at, self._value = end + len(self._format.parameter_end), None
        return Malformed(reason, len(text) if mark is None else mark.start())

    def _json_of(self, value: _Value, raw: str) -> str | None:
        """A value as JSON text; None where the call says that it is JSON, and it is not."""
        around = self._format.around_value
        text = raw.removeprefix(around).removesuffix(around) if around else raw
        if value.said and "string" not in value.types:
            return text.strip(JSON_SPACE) if read_json(text)[1] else None
        return value_json(text, value.types, python_literals=self._format.python_literals)


_SAID = {"true": frozenset({"string"}), "false": ANY - {"string"}}
"""The types of a value, where the call says whether it is a string."""


@dataclass
class _Value:
    """A value that is being read: its parameter, its types (`said` by the call, or by the schema), what was seen."""

    name: str
    types: Types
    said: bool
    start: int

    def __post_init__(self) -> None:
        self.seen = self.start
        self.depth = 0  # how many calls are open in it
        self.inner_end: int | None = None  # where the last of them has ended
        self.call_over: int | None = None  # where something stands that looks like the end of the call
        self.broken_at: int | None = None  # where it ends, its closing tag missing
        self.first_call: int | None = None  # where the first call in it begins
        self.json = JsonText(self.start) if "string" not in self.types else None
