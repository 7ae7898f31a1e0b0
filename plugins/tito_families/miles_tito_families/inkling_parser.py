"""How Inkling's generations are read: a row of typed blocks, each closed by the same token."""

from __future__ import annotations

import re

from miles_core.tito import CallReader, JsonCalls, Malformed, StreamParser, TextStream, ToolSchemas, Unfinished
from miles_core.tito.parse import Delta
from miles_core.tito.stream import held

MODEL = "<|message_model|>"
THINKING = "<|content_thinking|>"
TEXT = "<|content_text|>"
CALL = "<|content_invoke_tool_json|>"
END = "<|end_message|>"

_KIND = re.compile("|".join(map(re.escape, (THINKING, TEXT, CALL, END))))
_CALLS = JsonCalls(opener=CALL, closer=END, arguments_key="args")
_KEYS = {THINKING: "reasoning_content", TEXT: "content"}


class InklingParser(StreamParser):
    """A block is a header (a call's tool; else nothing), the token of its kind, its body, and a closing token.

    The prompt has opened the first block. A call's name is in its header and in its body; one that is missing in the
    header is taken from the body, two that differ make the call malformed.
    """

    def __init__(self, text: TextStream, *, calls: bool = True, reasoning: bool = True) -> None:
        super().__init__(text)
        self._calls_on = calls
        self._reasoning_on = reasoning
        self._seen = 0  # how much of the buffer was searched for what ends its part
        self._header: str | None = ""  # None inside a block
        self._kind = TEXT
        self._reader: CallReader | None = None
        self._resume = 0  # where reading goes on if the call is cut off

    def _step(self, deltas: list[Delta], final: bool) -> bool:
        if self._header is not None:
            return self._in_header(deltas, final)
        if self._reader is not None:
            return self._in_call(self._reader, deltas, final)
        return self._in_text(deltas, final)

    def _cut(self, size: int) -> str:
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        self._seen = 0
        return text

    def _in_header(self, deltas: list[Delta], final: bool) -> bool:
        """Between blocks: what kind the next one is."""
        found = _KIND.search(self._buffer, self._seen)
        if found is None:
            self._seen = max(0, len(self._buffer) - len(CALL) + 1)
            # A generation cut off in a header ends without the block; other text that no block holds is shown.
            if final:
                text = self._cut(len(self._buffer))
                if self._calls_on and MODEL in text and not text.endswith(MODEL):
                    self._fault("cut off", text)
                self._emit(deltas, "content", text.removeprefix(MODEL))
            return False
        header = self._cut(found.start()).removeprefix(MODEL)
        self._cut(len(found[0]))
        if found[0] == END:
            if header and self._calls_on:
                self._fault("malformed (a block has no kind)", header)
            self._emit(deltas, "content", header)
            return True
        self._header, self._kind = None, found[0]
        self._named = header
        if self._kind == CALL and self._calls_on:
            self._reader, self._resume = _CALLS.reader(ToolSchemas()), 0
        elif self._kind == CALL or (self._kind == THINKING and not self._reasoning_on):
            self._emit(deltas, "content", header + self._kind)
            self._kind = TEXT
        else:
            self._emit(deltas, _KEYS[self._kind], header)
        return True

    def _in_text(self, deltas: list[Delta], final: bool) -> bool:
        end = self._buffer.find(END)
        if end >= 0:
            self._emit(deltas, _KEYS[self._kind], self._cut(end))
            self._cut(len(END))
            self._header = ""
            return True
        keep = 0 if final else held(self._buffer, END)
        self._emit(deltas, _KEYS[self._kind], self._cut(len(self._buffer) - keep))
        return False

    def _in_call(self, reader: CallReader, deltas: list[Delta], final: bool) -> bool:
        """A call is whole at a closing token that stands in no string of its JSON."""
        end = self._buffer.find(END, self._seen) + len(END)
        if end < len(END):
            self._seen = max(self._seen, len(self._buffer) - len(END) + 1)
            if final:
                self._no_call(deltas, "cut off", self._resume or len(self._buffer))
            return final
        reading = reader.read(self._buffer[:end])
        if isinstance(reading, Unfinished):
            self._seen, self._resume = end, self._resume or end
        elif isinstance(reading, Malformed):
            self._no_call(deltas, f"malformed ({reading.reason})", self._resume or end)
        elif self._named not in ("", reading.name):
            self._no_call(deltas, f"malformed (its header names {self._named!r})", end)
        else:
            self._emit_call(deltas, reading)
            self._cut(end)
            self._header, self._reader = "", None
        return True

    def _no_call(self, deltas: list[Delta], reason: str, end: int) -> None:
        """A call that is none is text, up to the first token that may have closed it."""
        text = self._named + CALL + self._cut(end)
        self._fault(reason, text)
        self._emit(deltas, "content", text)
        self._header, self._reader = "", None
