"""Reading what a model wrote: ids to reasoning, content and tool calls, token by token, never failing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from miles_core.tito.arguments import ToolSchemas
from miles_core.tito.calls import Call, CallFormat, Malformed
from miles_core.tito.stream import TextStream, held
from miles_core.types import Message

Delta = dict[str, Any]
"""What a chat completion streams: `content`, `reasoning_content` or `tool_calls`."""

MOST_TRIES = 64
"""How often a call is read again because its end seemed to stand inside a value: bounds the work on odd text."""


@dataclass(frozen=True, kw_only=True)
class ParseFacts:
    """Where reasoning and tool calls stand in a generation.

    `reasoning` are the tags around it, `inside_reasoning` what the template writes just inside them,
    `after_reasoning` what it writes behind the closing one. `before_calls` is what it writes between content and the
    first call, `between_calls` between two calls, `after_call` behind each. `calls_end_reasoning` says that a
    block of calls at the start of a line ends reasoning that is never closed.
    """

    reasoning: tuple[str, str] | None = None
    inside_reasoning: tuple[str, str] = ("\n", "\n")
    after_reasoning: str = ""
    calls: CallFormat | None = None
    before_calls: str = ""
    between_calls: str = ""
    after_call: str = ""
    calls_end_reasoning: bool = False

    @property
    def tags(self) -> tuple[str, ...]:
        """The texts that must be tokens of the checkpoint."""
        return (self.reasoning or ()) + (self.calls.tokens if self.calls else ())


class StreamParser:
    """Fed with sampled ids; gives OpenAI deltas, and at any time the message they amount to.

    What comes out does not depend on how the ids are split. A call is handed out when it is whole and well formed.
    A cut-off or malformed call stays visible as text, with the reason in `faults`; arguments are never guessed.
    A family whose generations are not tagged text brings a subclass with its own `_step`.
    """

    def __init__(self, text: TextStream) -> None:
        self._text = text
        self._buffer = ""
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[Call] = []
        self.faults: list[str] = []
        """Why parts that look like tool calls are not."""

    def feed(self, ids: Iterable[int]) -> list[Delta]:
        """Take more sampled ids; the deltas they complete (`content`, `reasoning_content`, `tool_calls`)."""
        self._buffer += self._text.feed(ids)
        return self._advance(final=False)

    def finish(self) -> list[Delta]:
        """The generation is over: what was held back comes out as text."""
        self._buffer += self._text.finish()
        return self._advance(final=True)

    def message(self) -> Message:
        """The message so far: `content` a string, other keys only where there is something."""
        message: Message = {"role": "assistant", "content": "".join(self._content)}
        reasoning = "".join(self._reasoning)
        if reasoning:
            message["reasoning_content"] = reasoning
        if self._calls:
            message["tool_calls"] = [
                {"id": call.id or f"call_{n}", "type": "function", "function": _function(call)}
                for n, call in enumerate(self._calls)
            ]
        return message

    def _advance(self, *, final: bool) -> list[Delta]:
        deltas: list[Delta] = []
        while self._step(deltas, final):
            pass
        return deltas

    def _step(self, deltas: list[Delta], final: bool) -> bool:
        """Take text off the buffer; False if nothing more can be told from it yet."""
        raise NotImplementedError

    def _emit(self, deltas: list[Delta], key: str, text: str) -> None:
        """Hand out text as `content` or `reasoning_content`."""
        if text:
            (self._content if key == "content" else self._reasoning).append(text)
            deltas.append({key: text})

    def _emit_call(self, deltas: list[Delta], call: Call) -> None:
        """Hand out a whole call."""
        own_id = {"id": call.id} if call.id else {}
        deltas.append(
            {"tool_calls": [{"index": len(self._calls), **own_id, "type": "function", "function": _function(call)}]}
        )
        self._calls.append(call)

    def _fault(self, reason: str, text: str) -> None:
        """Note why a text is not a call."""
        self.faults.append(f"a tool call is {reason}: {text[:200]!r}")


def _function(call: Call) -> dict[str, str]:
    return {"name": call.name, "arguments": call.arguments}


class TaggedParser(StreamParser):
    """Reads generations that mark reasoning and calls by tags, as `ParseFacts` says.

    `opened` says whether the prompt has opened the reasoning block; None that it is not known, and that the closing
    tag will tell. `prompted` is what the prompt wrote behind the opening tag.
    """

    def __init__(
        self,
        facts: ParseFacts,
        text: TextStream,
        schemas: ToolSchemas,
        *,
        opened: bool | None = False,
        prompted: str = "",
        calls: bool = True,
        reasoning: bool = True,
    ) -> None:
        super().__init__(text)
        self._facts = facts
        self._schemas = schemas
        self._format = facts.calls if calls else None
        self._opener, self._closer = facts.reasoning or ("", "")
        self._trim = ""
        self._prompted = prompted
        self._lead = ""  # text before the call that is being read, which may be the template's
        self._said = False  # whether text was handed out since the last call
        self._block = 0  # how many calls the block that is being read has given
        self._tried = 0  # where in the buffer the search for the end of a call goes on
        self._tries = 0
        self._depth = 0  # in a block that is text: how many closing tags are due
        self._skip = 0  # how much of the buffer the count of them has seen
        self._state = self._content_state if not (reasoning and facts.reasoning) else self._start_state
        self._opened = opened

    def _step(self, deltas: list[Delta], final: bool) -> bool:
        return self._state(deltas, final)

    # -- reasoning ---------------------------------------------------------------------------------------------

    def _start_state(self, deltas: list[Delta], final: bool) -> bool:
        """Before anything is known: an opening tag, or what the prompt has begun."""
        text = self._buffer.lstrip()
        if text.startswith(self._opener):
            self._buffer = text[len(self._opener) :]
            self._trim, self._state = self._facts.inside_reasoning[0], self._reasoning_state
            return True
        if not final and self._opener.startswith(text):
            return False
        opened = self._told(final) if self._opened is None else self._opened
        if opened is None:
            return False
        self._trim = self._facts.inside_reasoning[0] if self._opened and not self._prompted else ""
        self._state = self._reasoning_state if opened else self._content_state
        return True

    def _told(self, final: bool) -> bool | None:
        """Whether the prompt had opened the block, by the tag that comes first; None while there is none."""
        closes, opens = self._buffer.find(self._closer), self._buffer.find(self._opener)
        if closes >= 0:
            return opens < 0 or closes < opens
        return False if opens >= 0 or final else None

    def _trimmed(self, final: bool) -> bool:
        """Drop what the template writes here by itself; False while it may still be coming."""
        while self._trim and self._buffer and self._buffer[0] == self._trim[0]:
            self._buffer, self._trim = self._buffer[1:], self._trim[1:]
        if self._trim and not self._buffer and not final:
            return False
        self._trim = ""
        return True

    def _reasoning_state(self, deltas: list[Delta], final: bool) -> bool:
        if not self._trimmed(final):
            return False
        tail = self._facts.inside_reasoning[1]
        text, closed, rest = self._buffer.partition(self._closer)
        call = -1 if closed else self._forgotten_end()
        if closed or (call >= 0 and final):
            self._emit(deltas, "reasoning_content", (text if closed else text[:call]).removesuffix(tail))
            self._buffer, self._trim = (rest, self._facts.after_reasoning) if closed else (text[call:], "")
            self._state = self._content_state
            return True
        if call < 0:
            self._release(deltas, "reasoning_content", final, *self._reasoning_ends)
        return False

    @cached_property
    def _reasoning_ends(self) -> tuple[str, ...]:
        """What may be beginning at the end of the reasoning so far."""
        tail = self._facts.inside_reasoning[1]
        calls = self._facts.calls_end_reasoning and self._format is not None
        ends = (self._closer, self._format.opener) if calls and self._format else (self._closer,)
        return (*ends, *(tail + end for end in ends))

    def _forgotten_end(self) -> int:
        """Where a call begins a line of reasoning, which ends it if no closing tag comes; -1 if nowhere."""
        if self._format is None or not self._facts.calls_end_reasoning:
            return -1
        at = self._buffer.find(self._format.opener)
        while at > 0 and self._buffer[at - 1] != "\n":
            at = self._buffer.find(self._format.opener, at + 1)
        if at == 0 and self._reasoning and not self._reasoning[-1].endswith("\n"):
            at = -1
        return at

    def _release(self, deltas: list[Delta], key: str, final: bool, *ahead: str) -> None:
        """Hand out the buffer, but for an end that may be the beginning of one of `ahead`."""
        keep = 0 if final else held(self._buffer, *ahead)
        self._emit(deltas, key, self._buffer[: len(self._buffer) - keep])
        self._buffer = self._buffer[len(self._buffer) - keep :]

    # -- content -----------------------------------------------------------------------------------------------

    def _content_state(self, deltas: list[Delta], final: bool) -> bool:
        if not self._trimmed(final):
            return False
        if self._format is None:
            self._emit(deltas, "content", self._buffer)
            self._buffer = ""
            return False
        opener = self._format.opener
        if opener in self._buffer:
            at = self._buffer.index(opener)
            self._lead, self._buffer = self._buffer[:at], self._buffer[at + len(opener) :]
            self._block = self._tried = self._tries = 0
            self._state = self._block_state
            return True
        size = len(self._content)
        self._release(
            deltas, "content", final, opener, self._facts.before_calls + opener, self._facts.between_calls + opener
        )
        self._said = self._said or any(not part.isspace() for part in self._content[size:])
        return False

    def _hand_out_lead(self, deltas: list[Delta]) -> None:
        """What stands before a call, without what the template writes there."""
        follows = bool(self._calls) and not self._said and not self._lead.strip()
        written = self._facts.between_calls if follows else self._facts.before_calls
        self._emit(deltas, "content", self._lead.removesuffix(written))
        self._lead, self._said = "", False

    # -- calls -------------------------------------------------------------------------------------------------

    @cached_property
    def _ends(self) -> re.Pattern[str]:
        """What may end a call or its block."""
        assert self._format is not None
        texts = [text for text in (self._format.call_end, self._format.closer) if text]
        return re.compile("|".join(map(re.escape, texts)))

    def _block_state(self, deltas: list[Delta], final: bool) -> bool:
        """Inside a block: whole calls come out, anything else makes the rest of it text."""
        assert self._format is not None
        found = self._ends.search(self._buffer, self._tried)
        if found is None:
            longest = max(len(self._format.closer), len(self._format.call_end or ""))
            self._tried = max(self._tried, len(self._buffer) - longest + 1)
            return self._not_a_call("cut off") if final else False
        self._tries += 1
        closes = found[0] == self._format.closer
        inside = self._buffer[: found.start() if closes else found.end()]
        if self._block and closes and not inside.strip():
            self._leave_block(found.end())
            return True
        reading = self._format.read(inside, self._schemas)
        if isinstance(reading, Call):
            self._take_call(deltas, reading, found.end())
        elif isinstance(reading, Malformed):
            return self._not_a_call(f"malformed ({reading.reason})")
        elif self._tries > MOST_TRIES:
            return self._not_a_call("malformed (its end cannot be told)")
        else:
            self._tried = found.end()
        return True

    def _take_call(self, deltas: list[Delta], call: Call, end: int) -> None:
        assert self._format is not None
        if not self._block:
            self._hand_out_lead(deltas)
        self._emit_call(deltas, call)
        if self._format.call_end is None:
            self._leave_block(end)
        else:
            self._buffer = self._buffer[end:]
            self._block, self._tried, self._tries = self._block + 1, 0, 0

    def _leave_block(self, end: int) -> None:
        self._buffer = self._buffer[end:]
        self._trim, self._state = self._facts.after_call, self._content_state

    def _not_a_call(self, reason: str) -> bool:
        """The rest of the block is text, through the closing tag that belongs to it."""
        assert self._format is not None
        if self._block:
            self._fault(reason, self._buffer)
        else:
            self._fault(reason, self._format.opener + self._buffer)
            self._buffer = self._lead + self._format.opener + self._buffer
            self._skip = len(self._lead) + len(self._format.opener)
        self._depth, self._state = 1, self._text_state
        self._lead = ""
        return True

    def _text_state(self, deltas: list[Delta], final: bool) -> bool:
        """Text through the closing tag of a block that is none."""
        assert self._format is not None
        opener, closer = self._format.opener, self._format.closer
        self._said = True
        for found in re.compile(f"{re.escape(opener)}|{re.escape(closer)}").finditer(self._buffer, self._skip):
            self._skip = found.end()
            self._depth += 1 if found[0] == opener else -1
            if self._depth == 0:
                self._emit(deltas, "content", self._buffer[: self._skip])
                self._buffer, self._skip, self._state = self._buffer[self._skip :], 0, self._content_state
                return True
        keep = 0 if final else held(self._buffer[self._skip :], opener, closer)
        out = self._buffer[: len(self._buffer) - keep]
        self._emit(deltas, "content", out)
        self._buffer, self._skip = self._buffer[len(out) :], 0
        return False
