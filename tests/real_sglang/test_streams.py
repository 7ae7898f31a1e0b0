"""Streamed turns through SGLang: live, and to the token what the same turn is when it comes whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.sessions import WEATHER, Talk, request, user
from helpers.streams import added_up, finish_of, streamed, streaming
from miles_core.server.app import ServerThread
from miles_engines.sglang import SGLangEngine

PLAIN = {"enable_thinking": False}
CALL = r'<tool_call>\n\{"name": "get_weather", "arguments": \{"city": "[A-Z][a-z]{4,8}"\}\}\n</tool_call>'
TURNS: dict[str, dict[str, Any]] = {
    "text": {"max_tokens": 12, "chat_template_kwargs": PLAIN},
    "reasoning": {"max_tokens": 12},
    "a forced call": {"max_tokens": 80, "regex": CALL, "tools": [WEATHER], "chat_template_kwargs": PLAIN},
    "reasoning left in the content": {"max_tokens": 12, "separate_reasoning": False},
}
GREEDY = {"temperature": 0.0}
"""SGLang heeds seeds only where its kernels are deterministic; the most likely token is the same one in any case."""


def told(message: dict[str, Any]) -> dict[str, Any]:
    """A message without the ids that calls were given."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return {"content": message["content"], "reasoning": message["reasoning_content"], "calls": calls}


@pytest.mark.parametrize("name", TURNS)
def test_a_live_turn_is_the_whole_one(server: ServerThread, name: str) -> None:
    asked, fields = [user("What is the weather in Paris?")], {**TURNS[name], **GREEDY}
    live, whole = Talk(server.url), Talk(server.url)
    stream = streamed(live, asked, patience=600, **fields)
    assert (stream.response.status, stream.form, stream.events[-1]) == (200, "live", "[DONE]")
    assert len(stream.chunks) > 8, "it comes token by token"
    answer = request(whole.chat_url, "POST", {"model": "m", "messages": asked, **fields}, timeout=600)
    assert told(added_up(stream.chunks)) == told(answer.message)
    assert finish_of(stream.chunks) == [answer.json["choices"][0]["finish_reason"]]
    (ours,), (theirs,) = live.samples().samples, whole.samples().samples
    assert ours["tokens"].tolist() == theirs["tokens"].tolist()
    assert ours["loss_mask"].tolist() == theirs["loss_mask"].tolist()
    assert np.allclose(ours["rollout_log_probs"], theirs["rollout_log_probs"], atol=1e-4)
    assert ours["weight_versions"] == theirs["weight_versions"]
    assert ours["prefix_cache_info"]["total_prompt_tokens"] == theirs["prefix_cache_info"]["total_prompt_tokens"]


def test_a_client_that_leaves_ends_the_generation(server: ServerThread, engine: SGLangEngine) -> None:
    talk = Talk(server.url)
    before = talk.state()
    with streaming(talk, [user("Go on.")], patience=600, max_tokens=3000, ignore_eos=True) as stream:
        for _ in range(4):
            stream.next()
    (url,) = engine.urls
    seen = [0]

    def running() -> bool:
        loads = request(f"{url}/v1/loads", timeout=600).json["loads"]
        seen.append(sum(load["num_used_tokens"] for load in loads))
        return any(load["num_running_reqs"] for load in loads)

    while running():
        pass
    assert max(seen) < 1500, "it was stopped long before it had said all"
    assert talk.state() == before
