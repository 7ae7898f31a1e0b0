"""The official client sends its own history back, in every form it has: under each matcher it is the stored one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from helpers.fake_engine import FakeEngine, says
from helpers.sessions import Talk, tool, user

CALLS = [("get_weather", '{"city":"Zürich","opts":{"b":2.0,"a":[1, 2]}}'), ("get_time", "{}")]
STRICT_TOOLS: Any = [
    {"type": "function", "function": {"name": name, "strict": True, "parameters": {"type": "object"}}}
    for name, _ in CALLS
]
MATCHERS = ("strict", "loose_tool_call", "role_content_only")

Ask = Callable[[openai.OpenAI, Any], Any]


def whole(api: openai.OpenAI, messages: Any) -> Any:
    """The message object itself."""
    return api.chat.completions.create(model="m", messages=messages, tools=STRICT_TOOLS).choices[0].message


def streamed(api: openai.OpenAI, messages: Any) -> Any:
    """What the helper makes of a stream, its parsed arguments included."""
    with api.chat.completions.stream(model="m", messages=messages, tools=STRICT_TOOLS) as stream:
        return stream.get_final_completion().choices[0].message


def parsed(api: openai.OpenAI, messages: Any) -> Any:
    """What the parsing helper returns."""
    return api.chat.completions.parse(model="m", messages=messages, tools=STRICT_TOOLS).choices[0].message


def added_up(api: openai.OpenAI, messages: Any) -> Any:
    """Deltas added up by hand, as agents do."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
    calls: dict[int, Any] = {}
    for chunk in api.chat.completions.create(model="m", messages=messages, tools=STRICT_TOOLS, stream=True):
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            message["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
            for part in choice.delta.tool_calls or []:
                call = calls.setdefault(
                    part.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                )
                call["id"] += part.id or ""
                call["function"]["name"] += part.function.name or ""
                call["function"]["arguments"] += part.function.arguments or ""
    return {**message, "tool_calls": list(calls.values())}


WAYS: dict[str, Ask] = {
    "object": whole,
    "dump": lambda api, messages: whole(api, messages).model_dump(),
    "dump without nulls": lambda api, messages: whole(api, messages).model_dump(exclude_none=True),
    "json": lambda api, messages: json.loads(whole(api, messages).to_json()),
    "stream helper": streamed,
    "parse helper": parsed,
    "deltas": added_up,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("matcher", MATCHERS)
@pytest.mark.parametrize("history", ["linear", "tree"])
def test_a_client_s_own_history_is_the_stored_one(
    servers: Any, engine: FakeEngine, history: str, matcher: str, way: str
) -> None:
    replies = [
        says("", reasoning="Look.\n", calls=CALLS[:1]),
        says("Both, then. ", reasoning="Hm.", calls=CALLS),
        says("Done é 🌊.", reasoning=""),
        says("\n\nAgain\n"),
    ]
    engine.plays(*replies)
    talk = Talk(servers(history, matcher).url)
    messages: list[Any] = [user("Weather?")]
    with openai.OpenAI(base_url=f"{talk.url}/v1", api_key="none", max_retries=0) as api:
        for reply in replies:
            messages.append(WAYS[way](api, messages))
            calls = reply.json["choices"][0]["message"]["tool_calls"] or []
            messages += [tool("18", call["id"]) for call in calls] or [user("And now?")]
    checkpoint: list[int] = []
    for turn, reply in zip(engine.turns, replies, strict=True):
        assert turn["input_ids"][: len(checkpoint)] == checkpoint
        checkpoint = [*turn["input_ids"], *reply.ids]
    assert len(talk.records) == len(replies)
    (sample,) = talk.samples().samples
    assert sample["tokens"].tolist() == checkpoint
    assert int(sample["loss_mask"].sum()) == sum(len(reply.ids) for reply in replies)
