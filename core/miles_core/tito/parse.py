"""Reading what a model wrote: ids to reasoning, content and tool calls, token by token, never failing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from miles_core.tito.arguments import ToolSchemas
from miles_core.tito.calls import Call, CallFormat, CallReader, Malformed, Unfinished
from miles_core.tito.stream import TextStream, held
from miles_core.types import Message

Delta = dict[str, Any]
"""What a chat completion streams: `content`, `reasoning_content` or `tool_calls`."""

MOST_TRIES = 64
"""At how many places it is looked whether a generation ends in whole calls: bounds the work on odd text."""

_PIECE = 4096
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, kw_only=True)
class ParseFacts:
    """Where reasoning and tool calls stand in a generation.

    `reasoning` are the tags around it, `inside_reasoning` what the template writes just inside them,
    `after_reasoning` what it writes behind the closing one. `before_calls` is what it writes between content and the
    first call, `between_calls` between two calls, `after_call` behind each.
    """

    reasoning: tuple[str, str] | None = None
    inside_reasoning: tuple[str, str] = ("\n", "\n")
    after_reasoning: str = ""
    calls: CallFormat | None = None
    before_calls: str = ""
    between_calls: str = ""
    after_call: str = ""

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
        return self._take(self._text.feed(ids))

    def feed_text(self, text: str) -> list[Delta]:
        """The same for text, where somebody else has decoded the ids."""
        return self._take(text)

    def finish(self) -> list[Delta]:
        """The generation is over: what was held back comes out as text."""
        return self._take(self._text.finish()) + self._advance(final=True)

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

    def _take(self, text: str) -> list[Delta]:
        deltas: list[Delta] = []
        # In pieces, since each step costs in proportion to what is in the buffer.
        for at in range(0, len(text), _PIECE):
            self._buffer += text[at : at + _PIECE]
            deltas += self._advance(final=False)
        return deltas

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
    tag will tell. `prompted` is what the prompt wrote behind the opening tag. Reasoning that is never closed, or a
    value of a call, ends where nothing but whole calls follow.
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
        self._opened = opened
        self._prompted = prompted
        self._seen = 0  # how much of the buffer the present state need not look at again
        self._trim = ""  # what the template writes next, as no part of the text
        self._doubt = False  # whether a call stands in the reasoning, which perhaps ends it
        self._lead = ""  # text before the block that is being read, which may be the template's
        self._said = False  # whether text was handed out since the last call
        self._given = 0  # how many calls the block that is being read has given
        self._shown = False  # whether its opening tag was handed out as text
        self._odd = ""  # the text where a call is due
        self._reader: CallReader | None = None
        self._resume: int | None = 0  # where reading goes on if the call that is being read is cut off
        self._ends_from = 0  # up to where in the buffer nothing can end a call
        self._is_cut_off = False
        self._salvages = True  # whether whole calls behind a cut-off one are looked for
        known = reasoning and facts.reasoning is not None
        self._state: _State = self._start_state if known else self._content_state
        written = self._format
        self._block = (written.opener, written.closer) if written is not None else ("", "")
        self._call_start = (written.call_start or "") if written is not None else ""
        self._call_ends = (*written.call_ends, written.closer) if written is not None else ()

    def finish(self) -> list[Delta]:
        deltas = super().finish()
        if self._format is not None and not self.faults:
            self._note_pieces("".join(self._content))
        return deltas

    def _note_pieces(self, content: str) -> None:
        """Pieces of calls that stand alone in the content."""
        stray = _any_of(self._call_start, *self._call_ends).search(content)
        begun = held(content, self._block[0])
        if stray is not None:
            self._fault("malformed (its beginning is missing)", content[max(0, stray.end() - 100) : stray.end()])
        elif begun > len(self._block[0]) // 2:
            self._fault("cut off", content[-begun:])

    def _step(self, deltas: list[Delta], final: bool) -> bool:
        return self._state(deltas, final)

    def _cut(self, size: int) -> str:
        """Take text off the buffer."""
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        self._ends_from = max(0, self._ends_from - size)
        self._seen = 0
        return text

    def _enter(self, state: _State) -> bool:
        self._state, self._seen = state, 0
        return True

    def _trimmed(self, final: bool) -> bool:
        """Drop what the template writes here by itself; False while it may still be coming."""
        if self._trim:
            cut_off = len(self._buffer) < len(self._trim) and self._trim.startswith(self._buffer)
            if cut_off and not final:
                return False
            if cut_off or self._buffer.startswith(self._trim):
                self._cut(len(self._trim))
            self._trim = ""
        return True

    def _release(self, deltas: list[Delta], key: str, final: bool, *ahead: str) -> None:
        """Hand out the buffer, but for an end that may be the beginning of one of `ahead`."""
        self._emit(deltas, key, self._cut(len(self._buffer) - (0 if final else held(self._buffer, *ahead))))

    # -- reasoning ---------------------------------------------------------------------------------------------

    def _start_state(self, deltas: list[Delta], final: bool) -> bool:
        """Before anything is known: an opening tag, or what the prompt has begun."""
        blank = self._seen = _space_end(self._buffer, self._seen)
        if self._buffer.startswith(self._opener, blank):
            self._cut(blank + len(self._opener))
            self._trim = self._facts.inside_reasoning[0]
            return self._enter(self._reasoning_state)
        if not final and self._opener.startswith(self._buffer[blank : blank + len(self._opener)]):
            return False
        if self._opened is None:
            return self._enter(self._untold_state)
        if self._opened and not self._prompted:
            self._trim = self._facts.inside_reasoning[0]
        return self._enter(self._reasoning_state if self._opened else self._content_state)

    def _untold_state(self, deltas: list[Delta], final: bool) -> bool:
        """Whether the prompt had opened the block is told by the tag that comes first."""
        found = _any_of(self._opener, self._closer).search(self._buffer, self._seen)
        if found is None and not final:
            self._seen = max(self._seen, len(self._buffer) - max(len(self._opener), len(self._closer)) + 1)
            return False
        opened = found is not None and found[0] == self._closer
        return self._enter(self._reasoning_state if opened else self._content_state)

    def _reasoning_state(self, deltas: list[Delta], final: bool) -> bool:
        if not self._trimmed(final):
            return False
        end = self._buffer.find(self._closer, self._seen)
        if end >= 0:
            self._end_reasoning(deltas, end)
            self._cut(len(self._closer))
            self._trim = self._facts.after_reasoning
            return True
        if not self._doubt:
            return self._still_reasoning(deltas, final)
        self._seen = max(self._seen, len(self._buffer) - len(self._closer) + 1)
        if final:
            call = self._whole_calls()
            self._end_reasoning(deltas, len(self._buffer) if call is None else self._before_call(call))
        return final

    def _still_reasoning(self, deltas: list[Delta], final: bool) -> bool:
        """Hand out reasoning up to a call, if there is one: it will show whether it is one."""
        tail, before = self._facts.inside_reasoning[1], self._facts.before_calls
        opener = self._block[0] or self._closer
        call = self._buffer.find(opener)
        self._doubt = call >= 0
        if self._doubt:
            end = len(self._buffer[: self._before_call(call)].removesuffix(tail))
            self._emit(deltas, "reasoning_content", self._cut(end))
            return True
        ahead = (self._closer, tail + self._closer, opener, tail + opener, before + opener, tail + before + opener)
        self._release(deltas, "reasoning_content", final, *ahead)
        return False

    def _before_call(self, at: int) -> int:
        """Where what the template writes before a call begins."""
        return len(self._buffer[:at].removesuffix(self._facts.before_calls))

    def _end_reasoning(self, deltas: list[Delta], end: int) -> None:
        self._emit(deltas, "reasoning_content", self._cut(end).removesuffix(self._facts.inside_reasoning[1]))
        self._enter(self._content_state)

    # -- content -----------------------------------------------------------------------------------------------

    def _content_state(self, deltas: list[Delta], final: bool) -> bool:
        if not self._trimmed(final):
            return False
        if self._format is None:
            self._emit(deltas, "content", self._cut(len(self._buffer)))
            return False
        opener = self._block[0]
        at = self._buffer.find(opener)
        if at >= 0:
            self._lead = self._cut(at)
            self._cut(len(opener))
            self._given, self._shown = 0, False
            return self._enter(self._between_state) if self._call_start else self._begin_call()
        size = len(self._content)
        ahead = (opener, self._facts.before_calls + opener, self._facts.between_calls + opener)
        self._release(deltas, "content", final, *ahead)
        self._said = self._said or any(not part.isspace() for part in self._content[size:])
        return False

    def _hand_out_lead(self, deltas: list[Delta]) -> None:
        """What stands before a block, without what the template writes there."""
        follows = bool(self._calls) and not self._said and not self._lead.strip()
        written = self._facts.between_calls if follows else self._facts.before_calls
        self._emit(deltas, "content", self._lead.removesuffix(written))
        self._lead, self._said = "", False

    # -- calls -------------------------------------------------------------------------------------------------

    def _begin_call(self) -> bool:
        assert self._format is not None
        self._reader, self._resume = self._format.reader(self._schemas), None
        self._enter(self._call_state)
        self._seen = self._ends_from
        return True

    def _call_state(self, deltas: list[Delta], final: bool) -> bool:
        """Behind the beginning of a call: it comes out once it is whole, or is text."""
        assert self._reader is not None
        found = _any_of(*self._call_ends).search(self._buffer, self._seen)
        first = self._seen <= self._ends_from
        if found is None:
            self._seen = max(self._seen, len(self._buffer) - max(map(len, self._call_ends)) + 1)
            self._ends_from = self._seen if first else self._ends_from
            return self._cut_off(deltas) if final else False
        self._ends_from = found.start() if first else self._ends_from
        reading = self._reader.read(self._buffer[: found.end()])
        if isinstance(reading, Unfinished):
            self._resume, self._seen = reading.at, found.end()
        elif isinstance(reading, Malformed):
            self._broken(deltas, f"malformed ({reading.reason})", reading.at, found.end())
        else:
            self._take_call(deltas, reading, found.end())
        return True

    def _take_call(self, deltas: list[Delta], call: Call, end: int) -> None:
        if not self._given and not self._shown:
            self._hand_out_lead(deltas)
        self._emit_call(deltas, call)
        self._given += 1
        self._reader = None
        self._cut(end)
        if self._call_start:
            self._enter(self._between_state)
        else:
            self._leave_block()

    def _leave_block(self) -> None:
        self._trim = self._facts.after_call
        self._enter(self._content_state)

    def _between_state(self, deltas: list[Delta], final: bool) -> bool:
        """In a block of any number of calls, where one may begin."""
        start, closer = self._call_start, self._block[1]
        at = self._seen = _space_end(self._buffer, self._seen)
        if self._buffer.startswith(start, at):
            return self._begin_call()
        if self._buffer.startswith(closer, at):
            return self._end_block(deltas, at + len(closer))
        rest = self._buffer[at : at + max(len(start), len(closer))]
        begins, ends = start.startswith(rest), closer.startswith(rest)
        if not final and (begins or ends):
            return False
        if final and (self._given or self._shown) and (not rest or (ends and not begins)):
            text = self._cut(len(self._buffer))  # what ends the block, cut off
            self._emit(deltas, "content", text if self._shown else "")
            return False
        if final and begins:
            self._resume = len(self._buffer)
            return self._cut_off(deltas)
        return self._enter(self._odd_text_state)

    def _end_block(self, deltas: list[Delta], end: int) -> bool:
        """The block is over. Its closing tag is shown if the opening one was."""
        if not self._given and not self._shown:
            self._fault("malformed (its block is empty)", self._block[0] + self._buffer[:end])
            self._show_block(deltas)
        text = self._cut(end)
        if self._shown:
            self._emit(deltas, "content", text)
        self._leave_block()
        return True

    # -- what is not a call ------------------------------------------------------------------------------------

    def _cut_off(self, deltas: list[Delta]) -> bool:
        """The generation ends inside a call. Whole calls at its very end are calls all the same."""
        at, self._is_cut_off = self._resume, True
        if at is None:
            at = self._whole_calls() if self._salvages else None
        self._broken(deltas, "cut off", len(self._buffer) if at is None else at, len(self._buffer))
        return True

    def _broken(self, deltas: list[Delta], reason: str, at: int, size: int) -> None:
        """A call that is none: what surely belongs to it is text, and reading goes on behind. `size` was read."""
        opener = "" if self._given or self._shown else self._block[0]
        self._fault(reason, opener + self._buffer[:size])
        self._show_block(deltas)
        self._reader = None
        if self._call_start:
            self._emit(deltas, "content", self._cut(max(at, _space_end(self._buffer, 0) + len(self._call_start))))
            self._enter(self._between_text_state)
        else:
            self._emit(deltas, "content", self._cut(len(self._buffer[:at].rstrip())))
            self._enter(self._content_state)

    def _show_block(self, deltas: list[Delta]) -> None:
        """Hand out the opening tag of a block as text, unless it has given a call."""
        if not self._given and not self._shown:
            self._emit(deltas, "content", self._lead + self._block[0])
            self._lead, self._shown = "", True
        self._said = True

    def _odd_text_state(self, deltas: list[Delta], final: bool) -> bool:
        """In a block of calls, text where a call is due: it is shown, through the next call or the block's end."""
        self._show_block(deltas)
        size = len(self._content)
        going_on = self._between_text_state(deltas, final)
        self._odd = (self._odd + "".join(self._content[size:]))[:200]
        if going_on or final:
            self._fault("malformed (text stands where a call is due)", self._odd)
            self._odd = ""
        return going_on

    def _between_text_state(self, deltas: list[Delta], final: bool) -> bool:
        """In a block of calls, text up to the next call or the end of the block."""
        found = _any_of(self._call_start, self._block[1]).search(self._buffer)
        if found is None:
            self._release(deltas, "content", final, self._call_start, self._block[1])
            return False
        self._emit(deltas, "content", self._cut(found.start()))
        return self._enter(self._between_state)

    def _whole_calls(self) -> int | None:
        """Where in the buffer whole calls begin behind which nothing else comes, to the end of the generation.

        A last one may be cut off, but where a value is read: that would be quoting calls rather.
        """
        within = self._reader is not None
        places = _any_of(self._block[0], self._call_start if within else "").finditer(self._buffer)
        for place in list(places)[-MOST_TRIES:]:
            trial = TaggedParser(self._facts, self._text, self._schemas, reasoning=False)
            trial._buffer, trial._salvages = self._buffer[place.start() :], False
            if place[0] == self._call_start:
                trial._given, trial._state = 1, trial._between_state
            if trial._only_calls() and not (within and trial.faults):
                return place.start()
        return None

    def _only_calls(self) -> bool:
        """Whether the buffer holds calls and nothing else; the last one may be cut off."""
        deltas: list[Delta] = []
        while self._step(deltas, True) and not self.faults:
            if any(not text.isspace() for text in self._content):
                return False
        if self.faults:
            return bool(self._calls) and self._is_cut_off
        return bool(self._calls) and not "".join(self._content).strip()


_State = Callable[[list[Delta], bool], bool]


@lru_cache(maxsize=256)
def _any_of(*texts: str) -> re.Pattern[str]:
    """A pattern of texts, of which some may be empty: they do not count."""
    return re.compile("|".join(re.escape(text) for text in texts if text))


def _space_end(text: str, at: int) -> int:
    """Where white space that begins at a place ends."""
    space = _SPACE.match(text, at)
    assert space is not None
    return space.end()
