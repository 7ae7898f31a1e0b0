"""Generations of every family as the built-in engine streams them: deltas, ids of calls, reasoning tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helpers.turns import FAMILIES, byte_family, strings, written
from miles_engines.local_server.chat_format import ChatFormat

TOOLS = strings("f", "g")
USER = [{"role": "user", "content": "u"}]
CALLS: list[tuple[str, dict[str, Any]]] = [("f", {"a": "x é"}), ("g", {})]

every_family = pytest.mark.parametrize("name", FAMILIES)


@every_family
def test_a_streamed_message(name: str) -> None:
    family = byte_family(name)
    chat = ChatFormat(family, family.tokenizer)
    ids = chat.encode(written(name, CALLS, "Look:", "Hm."))
    builder = chat.parser(chat.prompt(USER, TOOLS, {}), TOOLS, calls=True, reasoning=True)
    deltas = [delta for token in ids for delta in builder.feed([token])] + builder.finish()
    message = builder.message()
    assert "".join(delta.get("content") or "" for delta in deltas) == message["content"] == "Look:"
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == message["reasoning_content"] == "Hm."
    parts = [part for delta in deltas for part in delta.get("tool_calls") or ()]
    assert [(part["index"], part["type"]) for part in parts] == [(0, "function"), (1, "function")]
    assert [part["id"] for part in parts] == [call["id"] for call in message["tool_calls"]]
    assert len({part["id"] for part in parts}) == 2
    read = [(part["function"]["name"], json.loads(part["function"]["arguments"])) for part in parts]
    assert read == CALLS
    assert builder.called


@every_family
def test_reasoning_tokens_run_through_the_one_that_ends_them(name: str) -> None:
    family = byte_family(name)
    chat = ChatFormat(family, family.tokenizer)
    ids = chat.encode(written(name, [], "Look:", "Hm."))
    builder = chat.parser(chat.prompt(USER, None, {}), None, calls=False, reasoning=True)
    builder.feed(ids)
    builder.finish()
    count = chat.reasoning_tokens(ids, builder.message())
    assert chat.decode(ids[:count]).endswith(("Hm.</think>", "Hm.\n</think>", "Hm.<|end_message|>"))
    cut = ids[: count - 1]  # cut off inside the reasoning: all of it counts
    builder = chat.parser(chat.prompt(USER, None, {}), None, calls=False, reasoning=True)
    builder.feed(cut)
    builder.finish()
    assert chat.reasoning_tokens(cut, builder.message()) == len(cut)


@pytest.mark.parametrize("name", [name for name in FAMILIES if byte_family(name).family.thinking_kwargs])
def test_an_answer_without_thinking_is_content(name: str) -> None:
    family = byte_family(name)
    chat = ChatFormat(family, family.tokenizer)
    off = dict.fromkeys(family.family.thinking_kwargs, False)
    builder = chat.parser(chat.prompt(USER, TOOLS, off), TOOLS, calls=True, reasoning=True)
    ids = chat.encode("Look: </think>")
    deltas = [delta for token in ids for delta in builder.feed([token])] + builder.finish()
    message = builder.message()
    assert (message["content"], message["reasoning_content"]) == ("Look: </think>", None)
    assert deltas[0] == {"content": "L"}
    assert chat.reasoning_tokens(ids, message) == 0
