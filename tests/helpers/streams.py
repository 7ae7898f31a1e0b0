"""Reading an event stream as it comes, and adding it up as a client does."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from helpers.fake_engine import Gate
from helpers.sessions import Message, Talk

Edit = Callable[[list[bytes]], Sequence[bytes | Gate]]
"""Changes the events of a fake engine's stream."""


def paused(place: int, gate: Gate) -> Edit:
    """A gate after that many events."""
    return lambda events: [*events[:place], gate, *events[place:]]


@dataclass
class Stream:
    """A stream that is being read; `events` are those read so far, without comments."""

    response: http.client.HTTPResponse
    events: list[str] = field(default_factory=list)
    comments: int = 0

    @property
    def form(self) -> str | None:
        """`live` or `whole`."""
        return self.response.headers["x-miles-stream"]

    def next(self) -> str | None:
        """The data of the next event, an `event:` line in front of it; None at the end."""
        lines: list[str] = []
        while line := self.response.readline():
            text = line.decode().rstrip("\n")
            if text.startswith(":"):
                self.comments += 1
            elif text:
                lines.append(text.removeprefix("data: "))
            elif lines:
                self.events.append("\n".join(lines))
                return self.events[-1]
        return None

    def rest(self) -> list[str]:
        """Read to the end; all events."""
        while self.next() is not None:
            pass
        return self.events

    @property
    def chunks(self) -> list[Any]:
        """The events read so far, those with chunks."""
        return [json.loads(event) for event in self.events if event.startswith("{")]


@contextmanager
def streaming(talk: Talk, messages: Sequence[Message], *, patience: float = 30, **fields: Any) -> Iterator[Stream]:
    """A streamed turn, its connection closed at the end of the block; `patience` is in seconds."""
    connection = http.client.HTTPConnection(urlsplit(talk.url).netloc, timeout=patience)
    body = json.dumps({"model": "m", "messages": messages, "stream": True, **fields})
    try:
        connection.request("POST", urlsplit(talk.chat_url).path, body)
        yield Stream(connection.getresponse())
    finally:
        connection.close()


def streamed(talk: Talk, messages: Sequence[Message], *, patience: float = 30, **fields: Any) -> Stream:
    """A whole streamed turn."""
    with streaming(talk, messages, patience=patience, **fields) as stream:
        stream.rest()
        return stream


def added_up(chunks: Sequence[Any]) -> Message:
    """The message that the deltas amount to, in the keys and order of one that came whole."""
    message: Message = {"role": None, "content": "", "reasoning_content": ""}
    calls: dict[int, Any] = {}
    for delta in (choice["delta"] for chunk in chunks for choice in chunk["choices"]):
        message["role"] = delta.get("role") or message["role"]
        for key in ("content", "reasoning_content"):
            message[key] += delta.get(key) or ""
        seen = [call["index"] for call in delta.get("tool_calls") or ()]
        assert len(set(seen)) == len(seen), delta
        for part in delta.get("tool_calls") or ():
            call = calls.setdefault(part["index"], {"function": {"arguments": ""}})
            call.update({k: v for k, v in part.items() if k != "function" and v is not None})
            function = part["function"]
            call["function"]["name"] = function.get("name") or call["function"].get("name")
            call["function"]["arguments"] += function.get("arguments") or ""
    message["reasoning_content"] = message["reasoning_content"] or None
    return {**message, "tool_calls": [call for _, call in sorted(calls.items())]} if calls else message


def finish_of(chunks: Sequence[Any]) -> list[str]:
    """The finish reasons in the chunks."""
    return [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c.get("finish_reason")]
