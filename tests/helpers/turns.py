"""Turns of every family as its own template writes them, on tokenizers with one token a byte, and how they are read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from helpers.golden import installed_family
from miles_core.testing import byte_tokenizer, tokenizer_for
from miles_core.tito import BoundFamily
from miles_core.types import Message

FAMILIES = (
    "deepseekv32",
    "deepseekv4",
    "deepseekv4@recipe",
    "glm47",
    "inkling",
    "kimi26",
    "minimax_m25",
    "nemotron3",
    "nemotron3@ultra",
    "qwen3",
    "qwen35",
    "qwennext",
)
"""One of each format; the others differ in nothing that a parser sees."""

ELEMENTS = tuple(name for name in FAMILIES if name.split("@")[0] not in ("inkling", "kimi26", "qwen3", "qwennext"))
"""The families whose calls have one element a parameter, the value standing bare."""

_ROLES = ("<|message_model|>", "<|message_user|>", "<|message_system|>", "<|message_tool|>")
_USER: Message = {"role": "user", "content": "u"}

Call = tuple[str, dict[str, Any]]


@cache
def byte_family(name: str) -> BoundFamily:
    """A family or `family@revision`, with one token a byte beside its control tokens."""
    family = installed_family(name.partition("@")[0])
    tokenizer = tokenizer_for(family)
    if name == "inkling":
        tokenizer = byte_tokenizer([*_ROLES, *family.inner_tokens])
    return family.bind(tokenizer, name.partition("@")[2] or family.revisions[0].name)


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """A tool of that name and parameters."""
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def strings(*names: str) -> list[dict[str, Any]]:
    """Tools of these names whose parameters `a` and `b` are strings."""
    return [tool(name, a={"type": "string"}, b={"type": "string"}) for name in names]


def written(name: str, calls: Sequence[Call], content: str = "", reasoning: str = "Hm.") -> str:
    """A turn's text as a model samples it after a prompt that has it think, without the stop token."""
    family = byte_family(name)
    listed = [
        {"id": f"functions.{function}:{n}", "type": "function", "function": {"name": function, "arguments": arguments}}
        for n, (function, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": listed}
    kwargs = family.merge_kwargs({})
    prompt = family.render([_USER], None, kwargs, True)
    whole = family.render([_USER, message], None, kwargs, False)
    assert whole.startswith(prompt), (prompt, whole)
    stops = [at for i in family.stop_ids if (at := whole.rfind(family.tokenizer.decode([i]))) > len(prompt)]
    return whole[len(prompt) : max(stops, default=len(whole))]


def block(name: str, calls: Sequence[Call]) -> str:
    """The calls of a turn alone."""
    marker = "C0NTENT"
    return written(name, calls, marker).partition(marker)[2]


class Read:
    """What a family reads in ids: at once, token by token and in pieces of seven, which must agree."""

    def __init__(self, name: str, ids: Sequence[int], tools: Any = None) -> None:
        family = byte_family(name)
        parser = family.parser(tools, {})
        deltas = parser.feed(ids) + parser.finish()
        self.faults, self.message = parser.faults, parser.message()
        assert _added(deltas) == _said(self.message)
        for size in (1, 7):
            other = family.parser(tools, {})
            deltas = [d for at in range(0, len(ids), size) for d in other.feed(ids[at : at + size])] + other.finish()
            assert _added(deltas) == _said(self.message)
            assert (other.message(), other.faults) == (self.message, self.faults)
        self.reasoning, self.content, _ = _said(self.message)

    @property
    def calls(self) -> list[Call]:
        """Names and arguments of the calls."""
        functions = [call["function"] for call in self.message.get("tool_calls", [])]
        return [(function["name"], json.loads(function["arguments"])) for function in functions]


def read(name: str, text: str, tools: Any = None) -> Read:
    """What a family reads in a text."""
    return Read(name, byte_family(name).encode(text), tools)


def _said(message: Message) -> tuple[str, str, list[Any]]:
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return message.get("reasoning_content", ""), message["content"], calls


def _added(deltas: Sequence[Message]) -> tuple[str, str, list[Any]]:
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls] == list(range(len(calls)))
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    content = "".join(delta.get("content", "") for delta in deltas)
    return reasoning, content, [call["function"] for call in calls]
