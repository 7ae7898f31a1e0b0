"""The deltas of a streamed answer, and the message they amount to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_core.session.body import short
from miles_core.types import Message

CALLS = "tool_calls"


class DeltaError(Exception):
    """A delta that no client could add to the ones before it; the text says why."""


class Deltas:
    """Adds up deltas as a client does: texts are joined, the parts of tool calls by their `index`."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {"content": [], "reasoning_content": []}
        self._values: dict[str, Any] = {"role": "assistant"}
        self._calls: dict[int, dict[str, Any]] = {}
        self._arguments: dict[int, list[str]] = {}

    def add(self, delta: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Take a delta. What to hand on in its place: itself, or several where clients could not read it as one.

        Each call of a delta needs an index of its own. Raises DeltaError.
        """
        for key, value in delta.items():
            if value is not None and key != CALLS:
                self._add_value(key, value)
        calls = delta.get(CALLS)
        if calls is None:
            return [dict(delta)]
        if not isinstance(calls, list):
            raise DeltaError(f"tool_calls that are no list ({short(calls)})")
        numbered = [self._add_call(call) for call in calls]
        indices = [call["index"] for call in numbered]
        if len(set(indices)) == len(indices):
            return [{**delta, CALLS: numbered}]
        rest = {key: value for key, value in delta.items() if key != CALLS}
        return [{**(rest if at == 0 else {}), CALLS: [call]} for at, call in enumerate(numbered)]

    def _add_value(self, key: str, value: Any) -> None:
        if key in ("content", "reasoning_content") and not isinstance(value, str):
            raise DeltaError(f"{key} that is no string ({short(value)})")
        if isinstance(value, str) and key != "role":
            self._texts.setdefault(key, []).append(value)
        else:
            self._values[key] = value

    def _add_call(self, part: Any) -> dict[str, Any]:
        """Add a part of a call; the part, with the index of its call."""
        if not isinstance(part, dict):
            raise DeltaError(f"a tool call that is no object ({short(part)})")
        index = part.get("index")
        if index is None:
            starts = not self._calls or part.get("id") is not None
            index = len(self._calls) if starts else max(self._calls)
        if isinstance(index, bool) or not isinstance(index, int) or index < 0:
            raise DeltaError(f"a tool call with the index {short(index)}")
        function = part.get("function") or {}
        if not isinstance(function, dict) or not isinstance(function.get("arguments") or "", str):
            raise DeltaError(f"a tool call whose function is {short(function)}")
        call = self._calls.setdefault(index, {"index": index, "type": "function", "function": {"name": None}})
        call.update({k: v for k, v in part.items() if k not in ("index", "function") and v is not None})
        call["function"].update({k: v for k, v in function.items() if k != "arguments" and v is not None})
        self._arguments.setdefault(index, []).append(function.get("arguments") or "")
        return part if part.get("index") is not None else {**part, "index": index}

    def message(self) -> Message:
        """The message so far, with the keys of one that was sent whole."""
        texts = {key: "".join(parts) for key, parts in self._texts.items()}
        message: Message = {**self._values, **texts}
        message["reasoning_content"] = texts["reasoning_content"] or None
        if self._calls:
            message[CALLS] = [
                {**call, "function": {**call["function"], "arguments": "".join(self._arguments[index])}}
                for index, call in sorted(self._calls.items())
            ]
        return message
