"""How Kimi's tool calls are read: an id that tells the function, and its arguments as JSON."""

from __future__ import annotations

import re
from dataclasses import dataclass

from miles_core.tito import Call, CallReader, JsonText, Malformed, Reading, ToolSchemas, Unfinished

_HEAD = re.compile(r"\s*<\|tool_call_begin\|>(?P<id>(?:(?!<\|tool_call).)*)<\|tool_call_argument_begin\|>", re.DOTALL)
_NAME = re.compile(r"\s*(?:functions\.)?(?P<name>.*?)(?::\d+)?\s*\Z", re.DOTALL)


@dataclass(frozen=True)
class KimiCalls:
    """Calls in one section. The id is kept as it was sampled, since history writes nothing else of the name.

    `functions.NAME:INDEX` is the form the model learned; of an id in another form, all of it is the name.
    """

    opener: str = "<|tool_calls_section_begin|>"
    closer: str = "<|tool_calls_section_end|>"
    call_start: str = "<|tool_call_begin|>"
    call_ends: tuple[str, ...] = ("<|tool_call_end|>",)
    tokens: tuple[str, ...] = (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    )

    def reader(self, schemas: ToolSchemas) -> CallReader:
        """A reader of one call."""
        return _KimiReader(self)


class _KimiReader:
    """Reads one call."""

    def __init__(self, format_: KimiCalls) -> None:
        self._format = format_
        self._id = ""
        self._json: JsonText | None = None
        self._arguments_at = 0
        self._first_end = 0

    def read(self, text: str) -> Reading:
        if self._json is None:
            head = _HEAD.match(text)
            if head is None:
                return Malformed("it has no id and arguments")
            self._id, self._arguments_at = head["id"], head.end()
            self._json = JsonText(self._arguments_at)
        self._first_end = self._first_end or len(text)
        (call_end,) = self._format.call_ends
        whole = text.endswith(call_end)
        end = len(text) - len(call_end if whole else self._format.closer)
        found = self._json.read(text, end)
        if found is None:
            return Unfinished(self._first_end)
        value, valid = found
        if not valid:
            return Malformed("its arguments are not JSON", self._arguments_at)
        if not isinstance(value, dict):
            return Malformed("its arguments are not an object", end)
        if not whole:
            return Malformed("it is not closed", end)
        name = _NAME.match(self._id)
        if name is None or not name["name"]:
            return Malformed("its id names no function", end)
        return Call(name["name"], text[self._arguments_at : end].strip(), self._id)
