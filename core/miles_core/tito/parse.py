"""Reading what a model wrote: ids to reasoning, content and tool calls, token by token, never failing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from miles_core.tito.tokenizer import Tokenizer
from miles_core.types import Message


@dataclass(frozen=True, kw_only=True)
class ParseFacts:
    """Where reasoning and tool calls stand in a generation: pairs of opening and closing tags.

    The body of a call is `{"name": …, "arguments": {…}}`.

    `around_reasoning` is what the template writes just inside the reasoning tags, `after_reasoning` what it
    writes behind the closing one, `before_call` what it writes between content and a call.
    """

    reasoning: tuple[str, str] | None = None
    calls: tuple[str, str] | None = None
    around_reasoning: str = "\n"
    after_reasoning: str = ""
    before_call: str = "\n"

    @property
    def tags(self) -> tuple[str, ...]:
        """Every tag's text."""
        return (self.reasoning or ()) + (self.calls or ())


class _TextStream:
    """Ids to text as they come; characters split over tokens are held back until whole."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._ids: list[int] = []
        self._start = 0  # the ids before it are out as text, and end on a whole character
        self._given = 0  # how many characters of the text behind it are out

    def feed(self, ids: Iterable[int]) -> str:
        self._ids.extend(i for i in ids if i not in self._hidden)
        return self._take(final=False)

    def finish(self) -> str:
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        if self._start == len(self._ids):
            return ""
        context = max(0, self._start - 6)
        before = self._tokenizer.decode(self._ids[context : self._start])
        text = self._tokenizer.decode(self._ids[context:])[len(before) :]
        certain = text if final else text.rstrip("\ufffd")
        out = certain[self._given :]
        if len(certain) == len(text):
            self._start, self._given = len(self._ids), 0
        else:
            self._given = max(self._given, len(certain))
        return out


class StreamParser:
    """Fed with sampled ids; gives OpenAI deltas, and at any time the message they amount to.

    A call is handed out when its closing tag has come and its body is well formed. A cut-off or malformed
    call stays visible as text, with the reason in `faults`; arguments are never guessed.
    """

    def __init__(
        self, facts: ParseFacts, tokenizer: Tokenizer, hidden: frozenset[int], *, calls: bool, reasoning: bool
    ) -> None:
        self._facts = facts
        self._text = _TextStream(tokenizer, hidden)
        self._calls_on = calls and facts.calls is not None
        self._state = "start" if reasoning and facts.reasoning else "content"
        self._buffer = ""
        self._trim = ""
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self.faults: list[str] = []
        """Why parts that look like tool calls are not."""

    def feed(self, ids: Iterable[int]) -> list[dict[str, Any]]:
        """Take more sampled ids; the deltas they complete (`content`, `reasoning_content`, `tool_calls`)."""
        self._buffer += self._text.feed(ids)
        return self._advance(final=False)

    def finish(self) -> list[dict[str, Any]]:
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
                {"id": f"call_{n}", "type": "function", "function": dict(call)} for n, call in enumerate(self._calls)
            ]
        return message

    # -- the machine: each step takes text off the buffer, or says that more is needed -------------------------

    def _advance(self, *, final: bool) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        steps = {
            "start": self._start,
            "reasoning": self._in_reasoning,
            "content": self._in_content,
            "call": self._in_call,
        }
        while steps[self._state](deltas, final):
            pass
        return deltas

    def _start(self, deltas: list[dict[str, Any]], final: bool) -> bool:
        opener = self._facts.reasoning[0] if self._facts.reasoning else ""
        text = self._buffer.lstrip()
        if text.startswith(opener):
            self._buffer = text[len(opener) :]
            self._state, self._trim = "reasoning", self._facts.around_reasoning
            return True
        if not final and opener.startswith(text):
            return False
        self._state = "content"
        return True

    def _trimmed(self, final: bool) -> bool:
        """Drop what the template writes here by itself; False while it may still be coming."""
        while self._trim and self._buffer and self._buffer[0] == self._trim[0]:
            self._buffer, self._trim = self._buffer[1:], self._trim[1:]
        if self._trim and not self._buffer and not final:
            return False
        self._trim = ""
        return True

    def _in_reasoning(self, deltas: list[dict[str, Any]], final: bool) -> bool:
        if not self._trimmed(final):
            return False
        closer = self._facts.reasoning[1] if self._facts.reasoning else ""
        text, found, rest = self._buffer.partition(closer)
        if found:
            self._emit(deltas, "reasoning_content", text.removesuffix(self._facts.around_reasoning))
            self._buffer, self._trim, self._state = rest, self._facts.after_reasoning, "content"
            return True
        keep = 0 if final else _held(self._buffer, self._facts.around_reasoning + closer, closer)
        self._emit(deltas, "reasoning_content", self._buffer[: len(self._buffer) - keep])
        self._buffer = self._buffer[len(self._buffer) - keep :]
        return False

    def _in_content(self, deltas: list[dict[str, Any]], final: bool) -> bool:
        if not self._trimmed(final):
            return False
        opener = self._facts.calls[0] if self._calls_on and self._facts.calls else None
        if opener is None:
            self._emit(deltas, "content", self._buffer)
            self._buffer = ""
            return False
        if opener in self._buffer:
            at = self._buffer.index(opener)
            self._lead = self._buffer[:at]
            self._buffer = self._buffer[at + len(opener) :]
            self._state = "call"
            return True
        keep = 0 if final else _held(self._buffer, self._facts.before_call + opener, opener)
        self._emit(deltas, "content", self._buffer[: len(self._buffer) - keep])
        self._buffer = self._buffer[len(self._buffer) - keep :]
        return False

    def _in_call(self, deltas: list[dict[str, Any]], final: bool) -> bool:
        opener, closer = self._facts.calls or ("", "")
        body, found, rest = self._buffer.partition(closer)
        if not found and not final:
            return False
        call = parse_json_call(body) if found else None
        if call is None:
            self.faults.append(f"a tool call is {'malformed' if found else 'cut off'}: {body[:200]!r}")
            self._emit(deltas, "content", self._lead + opener + body + (closer if found else ""))
        else:
            self._emit(deltas, "content", self._lead.removesuffix(self._facts.before_call))
            deltas.append({"tool_calls": [{"index": len(self._calls), "type": "function", "function": dict(call)}]})
            self._calls.append(call)
        self._buffer, self._lead, self._state = rest, "", "content"
        return True

    def _emit(self, deltas: list[dict[str, Any]], key: str, text: str) -> None:
        if text:
            (self._content if key == "content" else self._reasoning).append(text)
            deltas.append({key: text})


def _held(text: str, *ahead: str) -> int:
    """Length of the longest end of `text` that could be the beginning of one of `ahead`."""
    longest = 0
    for tag in ahead:
        for size in range(min(len(tag), len(text)), longest, -1):
            if tag.startswith(text[-size:]):
                longest = size
                break
    return longest


def parse_json_call(body: str) -> dict[str, Any] | None:
    """`{"name": …, "arguments": {…}}` as name and arguments (their JSON text as the model wrote it), or None."""
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    text = body.strip()
    try:
        value = decoder.decode(text)
        arguments = _raw_member(decoder, text, "arguments")
        text.encode("utf-8")
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    given = value.get("arguments", {})
    if isinstance(given, str):
        return {"name": value["name"], "arguments": given}
    if not isinstance(given, dict):
        return None
    return {"name": value["name"], "arguments": arguments if arguments is not None else "{}"}


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _raw_member(decoder: json.JSONDecoder, text: str, name: str) -> str | None:
    """The text of a member's value in a JSON object, exactly as written (the last one, as JSON readers take it)."""
    if not text.startswith("{"):
        return None
    found, at = None, 1
    while at < len(text):
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        if at >= len(text) or text[at] == "}":
            break
        key, at = decoder.raw_decode(text, at)
        at = text.index(":", at) + 1
        while text[at] in " \t\r\n":
            at += 1
        _, end = decoder.raw_decode(text, at)
        if key == name:
            found = text[at:end]
        at = end
    return found
