"""How Inkling's generations are read: a row of typed blocks, each closed by the same token."""

from __future__ import annotations

import re

from miles_core.tito import JsonCalls, Malformed, StreamParser, TextStream, ToolSchemas, Unfinished
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
        self._header: str | None = ""  # None inside a block
        self._kind = TEXT

    def _step(self, deltas: list[Delta], final: bool) -> bool:
        if self._header is not None:
            return self._in_header(deltas, final)
        if self._kind == CALL and self._calls_on:
            return self._in_call(deltas, final)
        return self._in_text(deltas, final)

    def _in_header(self, deltas: list[Delta], final: bool) -> bool:
        """Between blocks: what kind the next one is."""
        found = _KIND.search(self._buffer)
        if found is None:
            # A generation cut off in a header ends without the block; other text that no block holds is shown.
            if final:
                self._emit(deltas, "content", self._buffer.removeprefix(MODEL))
                self._buffer = ""
            return False
        header = self._buffer[: found.start()].removeprefix(MODEL)
        self._buffer = self._buffer[found.end() :]
        if found[0] == END:
            self._emit(deltas, "content", header)
            return True
        self._header, self._kind = None, found[0]
        self._named = header
        if self._kind == THINKING and not self._reasoning_on:
            self._kind = TEXT
            self._emit(deltas, "content", header + THINKING)
        elif self._kind == CALL and not self._calls_on:
            self._kind = TEXT
            self._emit(deltas, "content", header + CALL)
        elif self._kind != CALL:
            self._emit(deltas, _KEYS[self._kind], header)
        return True

    def _in_text(self, deltas: list[Delta], final: bool) -> bool:
        text, found, rest = self._buffer.partition(END)
        if found:
            self._emit(deltas, _KEYS[self._kind], text)
            self._buffer, self._header = rest, ""
            return True
        keep = 0 if final else held(self._buffer, END)
        self._emit(deltas, _KEYS[self._kind], self._buffer[: len(self._buffer) - keep])
        self._buffer = self._buffer[len(self._buffer) - keep :]
        return False

    def _in_call(self, deltas: list[Delta], final: bool) -> bool:
        body, found, rest = self._buffer.partition(END)
        if not found and not final:
            return False
        reading = _CALLS.read(body, ToolSchemas()) if found else Malformed("cut off")
        if isinstance(reading, Unfinished):
            reading = Malformed("it is not JSON")
        if not isinstance(reading, Malformed) and self._named not in ("", reading.name):
            reading = Malformed(f"its header names {self._named!r}")
        if isinstance(reading, Malformed):
            self._fault("cut off" if not found else f"malformed ({reading.reason})", self._named + CALL + body)
            self._emit(deltas, "content", self._named + CALL + body + found)
        else:
            self._emit_call(deltas, reading)
        self._buffer, self._header = rest, ""
        return True
