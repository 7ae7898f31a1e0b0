"""A whole answer as an event stream, for agents that asked for `stream=true`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from miles_core.session.reply import Generation

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keep-alive\n\n"


def whole_answer(generation: Generation, *, include_usage: bool) -> Iterator[bytes]:
    """Events whose deltas concatenate to the message: one with everything, one that finishes, usage, the end."""
    reply = generation.reply
    choice = reply["choices"][0]
    head: dict[str, Any] = {key: reply[key] for key in ("id", "created", "model", "system_fingerprint") if key in reply}
    head["object"] = "chat.completion.chunk"
    first: dict[str, Any] = {"index": 0, "delta": _delta(generation.message), "finish_reason": None}
    if choice.get("logprobs") is not None:
        first["logprobs"] = choice["logprobs"]
    yield event(orjson.dumps({**head, "choices": [first]}))
    last = {"index": 0, "delta": {}, "finish_reason": choice.get("finish_reason")}
    yield event(orjson.dumps({**head, "choices": [last]}))
    if include_usage:
        yield event(orjson.dumps({**head, "choices": [], "usage": reply.get("usage")}))
    yield DONE


def _delta(message: dict[str, Any]) -> dict[str, Any]:
    delta = {key: value for key, value in message.items() if value is not None}
    delta.setdefault("role", "assistant")
    if delta.get("tool_calls"):
        delta["tool_calls"] = [{**call, "index": index} for index, call in enumerate(delta["tool_calls"])]
    return delta


def event(data: bytes) -> bytes:
    """An event of one line of data."""
    return b"data: " + data + b"\n\n"


def error_event(body: dict[str, Any]) -> bytes:
    """A fault after the first byte was sent; no `[DONE]` follows."""
    return b"event: error\ndata: " + orjson.dumps(body) + b"\n\n"
