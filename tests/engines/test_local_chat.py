"""What a chat answer makes of the sampled tokens, whole and streamed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from helpers.scripted import Client, scripted

TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest_asyncio.fixture
async def client(tiny: Path) -> AsyncIterator[Client]:
    async with scripted(tiny) as opened:
        yield opened


def folded(events: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """The message that a stream's deltas amount to, and the finish reason."""
    message: dict[str, Any] = {"content": "", "reasoning_content": ""}
    reason = ""
    for choice in (choice for event in events for choice in event["choices"]):
        delta = choice["delta"]
        for key in ("content", "reasoning_content"):
            message[key] += delta.get(key) or ""
        for call in delta.get("tool_calls") or ():
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    return message, reason


def simplified(message: dict[str, Any]) -> dict[str, Any]:
    """A whole answer's message in the form of `folded`, ids left out."""
    out = {"content": message["content"], "reasoning_content": message["reasoning_content"] or ""}
    calls = [call.get("function", call) for call in message.get("tool_calls", [])]
    plain = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
    return {**out, "tool_calls": plain} if plain else out


async def both(client: Client, **fields: Any) -> tuple[dict[str, Any], str]:
    """The message and finish reason, which must be the same whole and streamed."""
    choice = (await client.chat(**fields))["choices"][0]
    events = await client.chat_stream(**fields)
    message, reason = folded(events)
    assert simplified(message) == simplified(choice["message"])
    assert reason == choice["finish_reason"]
    return choice["message"], reason


async def test_a_tool_call(client: Client) -> None:
    client.play(f"<think>\nhm\n</think>\n\nI look.\n{CALL}<|im_end|>")
    message, reason = await both(client, tools=TOOLS)
    assert reason == "tool_calls"
    assert message["reasoning_content"] == "hm"
    assert message["content"] == "I look."
    (call,) = message["tool_calls"]
    assert re.fullmatch("call_[0-9a-f]{24}", call["id"])
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}


async def test_a_tool_call_alone_has_empty_content(client: Client) -> None:
    client.play(f"{CALL}\n{CALL}<|im_end|>")
    message, reason = await both(client, tools=TOOLS)
    assert (message["content"], len(message["tool_calls"]), reason) == ("", 2, "tool_calls")
    assert len({call["id"] for call in message["tool_calls"]}) == 2


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
async def test_without_tools_a_call_is_text(client: Client, fields: dict[str, Any]) -> None:
    client.play(f"{CALL}<|im_end|>")
    message, reason = await both(client, **fields)
    assert (message["content"], reason) == (CALL, "stop")
    assert "tool_calls" not in message


async def test_a_call_that_was_cut_off_is_no_call(client: Client) -> None:
    client.play(CALL)
    length = len(client.scheduler.script) - 3
    message, reason = await both(client, tools=TOOLS, max_tokens=length)
    assert reason == "length"
    assert "tool_calls" not in message
    assert message["content"].startswith("<tool_call>")


async def test_a_whole_call_in_a_cut_off_answer_keeps_the_reason(client: Client) -> None:
    client.play(f"{CALL}\nand then")
    message, reason = await both(client, tools=TOOLS, max_tokens=len(client.scheduler.script))
    assert (len(message["tool_calls"]), reason) == (1, "length")


async def test_reasoning_may_stay_in_the_content(client: Client) -> None:
    client.play("<think>\nhm\n</think>\n\nyes<|im_end|>")
    message, _ = await both(client, separate_reasoning=False)
    assert message["content"] == "<think>\nhm\n</think>\n\nyes"
    message, _ = await both(client)
    assert (message["reasoning_content"], message["content"]) == ("hm", "yes")


async def test_a_prompt_may_have_opened_the_reasoning(client: Client) -> None:
    client.play("hm\n</think>\n\nyes<|im_end|>")
    ids = client.service.format.encode("<|im_start|>assistant\n<think>\n")
    message, _ = await both(client, input_ids=ids)
    assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
    closed = client.service.format.encode("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    message, _ = await both(client, input_ids=closed)
    assert message["reasoning_content"] is None


async def test_reasoning_tokens_are_counted(client: Client) -> None:
    client.play("<think>\nhm\n</think>\n\nyes<|im_end|>")
    whole = await client.chat(return_meta_info=True)
    events = await client.chat_stream(stream_options={"include_usage": True})
    closer = client.service.format.encode("</think>")[0]
    count = client.scheduler.script.index(closer) + 1
    assert whole["usage"]["reasoning_tokens"] == count == events[-1]["usage"]["reasoning_tokens"]
    assert whole["choices"][0]["meta_info"]["reasoning_tokens"] == count


async def test_a_stop_string_is_cut_off_but_its_tokens_stay(client: Client) -> None:
    client.play("the quick brown fox<|im_end|>")
    message, reason = await both(client, stop=["brown"])
    assert (message["content"], reason) == ("the quick ", "stop")
    reply = await client.chat(stop="brown", logprobs=True, return_meta_info=True, return_token_ids=True)
    choice = reply["choices"][0]
    assert choice["matched_stop"] == "brown"
    assert client.service.format.decode(choice["response_token_ids"]) == "the quick brown"
    ids = [token for _, token, _ in choice["meta_info"]["output_token_logprobs"]]
    assert ids == choice["response_token_ids"]
    message, _ = await both(client, stop="brown", no_stop_trim=True)
    assert message["content"] == "the quick brown"


async def test_every_streamed_token_has_its_logprob_and_id(client: Client) -> None:
    client.play(f"<think>\nhm\n</think>\n\n日本 {CALL}<|im_end|>")
    events = await client.chat_stream(tools=TOOLS, logprobs=True, return_output_ids_in_sglext=True)
    entries = [e for event in events for c in event["choices"] if c["logprobs"] for e in c["logprobs"]["content"]]
    ids = next(event["sglext"]["output_ids"][0] for event in events if "sglext" in event)
    assert ids == client.scheduler.script
    assert [entry["token"] for entry in entries] == [client.service.format.token_text(token) for token in ids]
    assert folded(events)[1] == "tool_calls"


async def test_several_choices(client: Client) -> None:
    client.play("the fox<|im_end|>")
    reply = await client.chat(n=3)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    count = len(client.scheduler.script)
    assert reply["usage"]["completion_tokens"] == 3 * count
    events = await client.chat_stream(n=3, stream_options={"include_usage": True})
    for index in range(3):
        own = [{"choices": [c for c in event["choices"] if c["index"] == index]} for event in events]
        assert folded(own) == ({"content": "the fox", "reasoning_content": ""}, "stop")
    assert events[-1]["usage"]["completion_tokens"] == 3 * count
    assert [job.params.seed for job in client.scheduler.jobs[:3]] == [None] * 3


async def test_seeds_of_several_choices_differ(client: Client) -> None:
    client.play("yes<|im_end|>")
    await client.chat(n=2, seed=5)
    assert [job.params.seed for job in client.scheduler.jobs] == [5, 6]


async def test_input_ids_are_used_as_they_are(client: Client) -> None:
    client.play("yes<|im_end|>")
    await client.chat(input_ids=[3, 1, 2])
    assert client.scheduler.jobs[0].prompt == [3, 1, 2]


async def test_messages_are_rendered_without_input_ids(client: Client) -> None:
    client.play("yes<|im_end|>")
    await client.chat(chat_template_kwargs={"enable_thinking": False}, tools=TOOLS)
    await client.chat(reasoning_effort="none", tools=TOOLS, tool_choice="none")
    texts = [client.service.format.decode(job.prompt) for job in client.scheduler.jobs]
    assert texts[0].endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert "get_weather" in texts[0]
    assert texts[1].endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert "get_weather" not in texts[1]


async def test_ids_outside_the_vocabulary_are_refused(client: Client) -> None:
    for ids, where in ([3, 512], 1), ([-1], 0):
        status, body = await client.send("/v1/chat/completions", {"messages": [{"role": "user"}], "input_ids": ids})
        assert status == 400
        text = f"input_ids[{where}] is {ids[where]}, outside the model's vocabulary of 512 ids."
        assert body["message"] == text
    status, body = await client.send("/generate", {"input_ids": [[1], [600]]})
    assert (status, list(body)) == (400, ["error"])
    assert client.scheduler.jobs == []


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"regex": "a+"}, "regex: the local engine has no constrained decoding; use --engine sglang for it."),
        ({"top_k": -2}, "top_k must be -1 (disable) or at least 1, got -2."),
        ({"min_p": 2}, "min_p must be in [0, 1], got 2.0."),
        ({"frequency_penalty": 3}, "frequency_penalty must be in [-2, 2], got 3.0."),
        ({"logit_bias": {"600": 1}}, "logit_bias has token id 600, outside the model's vocabulary of 512 ids."),
        ({"n": 0}, "n must be at least 1, got 0."),
        ({"max_tokens": 4, "min_tokens": 5}, "min_new_tokens must be in [0, max_new_tokens(4)], got 5."),
        ({"messages": [{"role": "bogus", "content": ""}]}, "1 validation error:"),
        ({"chat_template_kwargs": {"clear_thinking": True}}, "chat_template_kwargs.clear_thinking=True is in conflict"),
    ],
)
async def test_refusals(client: Client, fields: dict[str, Any], text: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    status, reply = await client.send("/v1/chat/completions", body)
    assert (status, reply["object"], reply["code"]) == (400, "error", 400)
    assert reply["message"].startswith(text)


async def test_unknown_fields_and_nulls_are_accepted(client: Client) -> None:
    client.play("yes<|im_end|>")
    nulls = dict.fromkeys(("temperature", "top_p", "top_k", "stop", "tools", "seed", "max_tokens", "n", "stream"))
    await client.chat(lora_path=None, return_routed_experts=False, bootstrap_room=3, **nulls)
    params = client.scheduler.jobs[0].params
    assert (params.temperature, params.top_p, params.top_k, params.stop) == (1.0, 1.0, -1, ())


async def test_the_default_limit_is_the_rest_of_the_context(client: Client) -> None:
    client.play("yes<|im_end|>")
    await client.chat(input_ids=[1] * 4000)
    assert client.scheduler.jobs[0].params.max_new_tokens == 96


async def test_the_models_own_sampling_defaults_apply_to_chat(client: Client) -> None:
    client.play("yes<|im_end|>")
    client.service.model.generation_defaults.update(temperature=0.6, top_k=20)
    await client.chat(top_k=5)
    await client.send("/generate", {"input_ids": [1]})
    chat, generate = (job.params for job in client.scheduler.jobs)
    assert (chat.temperature, chat.top_k) == (0.6, 5)
    assert (generate.temperature, generate.top_k, generate.max_new_tokens) == (1.0, -1, 128)


async def test_a_rid_in_use_is_refused(client: Client) -> None:
    client.play("the quick brown fox")
    client.scheduler.hold = 1
    body = {"messages": [{"role": "user", "content": "hi"}], "rid": "mine"}
    running = asyncio.ensure_future(client.send("/v1/chat/completions", body))
    while not client.scheduler.jobs:
        await asyncio.sleep(0)
    status, reply = await client.send("/v1/chat/completions", body)
    assert (status, reply["message"]) == (400, "Duplicate request ID detected: mine")
    await client.send("/abort_request", {"rid": "mi"})
    status, reply = await running
    assert (status, reply["id"], reply["choices"][0]["finish_reason"]) == (200, "mine", "abort")


async def test_an_aborted_stream_ends_in_order(client: Client) -> None:
    client.play("the quick brown fox")
    client.scheduler.hold = 2
    running = asyncio.ensure_future(client.chat_stream(rid="mine"))
    while not client.scheduler.jobs or len(client.scheduler.jobs[0].output_ids) < 2:
        await asyncio.sleep(0)
    await client.send("/abort_request", {"rid": "mine"})
    message, reason = folded(await running)
    assert reason == "abort"
    assert message["content"] == client.service.format.decode(client.scheduler.script[:2])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_ends_its_job(client: Client, stream: bool) -> None:
    client.play("the quick brown fox")
    client.scheduler.hold = 2
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": stream, "rid": "mine"}
    request = asyncio.ensure_future(client.session.post("/v1/chat/completions", json=body))
    while not client.scheduler.jobs or len(client.scheduler.jobs[0].output_ids) < 2:
        await asyncio.sleep(0)
    if stream:
        (await request).close()
    else:
        request.cancel()
    job = client.scheduler.jobs[0]
    async with asyncio.timeout(5):
        while job.finish is None:
            await asyncio.sleep(0)
    assert job.finish["type"] == "abort"
    assert client.service.rids("mine", 1) == ["mine"]


async def test_a_failed_generation_is_an_http_error(client: Client) -> None:
    failed = {"type": "abort", "message": "the local engine failed: x", "status_code": 500, "err_type": "E"}
    client.play("", **failed)
    status, reply = await client.send("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
    assert (status, reply["message"]) == (500, "the local engine failed: x")
    assert (await client.send("/generate", {"input_ids": [1]}))[0] == 500
    events = await client.chat_stream()
    assert events[-1]["error"]["message"] == "the local engine failed: x"


async def test_generate_from_text_with_several_prompts(client: Client) -> None:
    client.play("the fox<|im_end|>")
    params = {"max_new_tokens": 9, "sampling_seed": 4, "stop": ["fo"]}
    status, replies = await client.send("/generate", {"text": ["a b", "c"], "sampling_params": params})
    assert status == 200
    assert [reply["text"] for reply in replies] == ["the ", "the "]
    assert [job.prompt for job in client.scheduler.jobs] == [client.service.format.encode(t) for t in ("a b", "c")]
    assert client.scheduler.jobs[0].params.seed == 4
    status, reply = await client.send("/generate", {"text": "a", "sampling_params": {"skip_special_tokens": False}})
    assert reply["text"] == "the fox"
    raw = {"skip_special_tokens": False, "no_stop_trim": True}
    status, reply = await client.send("/generate", {"text": "a", "sampling_params": raw})
    assert reply["text"] == "the fox<|im_end|>"


async def test_the_cache_is_not_flushed_under_running_requests(client: Client) -> None:
    client.play("the fox")
    client.scheduler.hold = 1
    running = asyncio.ensure_future(client.chat_stream())
    while not client.scheduler.jobs:
        await asyncio.sleep(0)
    assert (await client.send("/flush_cache"))[0] == 400
    await client.send("/abort_request", {"abort_all": True})
    await running
    assert (await client.send("/flush_cache"))[0] == 200


async def test_health_generate_samples_a_token(client: Client) -> None:
    client.play("yes")
    assert await client.send("/health_generate", method="GET") == (200, "")
    assert client.scheduler.jobs[0].params.max_new_tokens == 1
