"""Answers have the shape of SGLang's saved ones: the same keys and types, and the same refusals word for word."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from helpers.scripted import Client, scripted

SAVED: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "sglang_replies.json").read_text("utf-8"))


@pytest_asyncio.fixture
async def client(tiny: Path) -> AsyncIterator[Client]:
    async with scripted(tiny, max_batch=1, max_queue=1) as opened:
        yield opened


def filled(value: Any) -> Any:
    """A saved request with lists of ids in the place of their lengths."""
    if isinstance(value, dict):
        if set(value) == {"ids"}:
            return [index % 400 for index in range(value["ids"])]
        return {key: filled(item) for key, item in value.items()}
    return [filled(item) for item in value] if isinstance(value, list) else value


def request(name: str) -> dict[str, Any]:
    """A saved request, without the constrained decoding that made random weights say something."""
    body: dict[str, Any] = filled(SAVED[name]["json"])
    return {key: value for key, value in body.items() if key != "regex"}


def same_shape(ours: Any, saved: Any, where: str = "") -> list[str]:
    """Where keys or types differ."""
    if isinstance(saved, dict) and isinstance(ours, dict):
        if list(ours) != list(saved):
            return [f"{where}: keys {list(ours)}, saved {list(saved)}"]
        return [line for key in saved for line in same_shape(ours[key], saved[key], f"{where}.{key}")]
    if isinstance(saved, list) and isinstance(ours, list):
        return same_shape(ours[0], saved[0], f"{where}[0]") if saved and ours else []
    fits = type(ours) is type(saved) or {type(ours), type(saved)} <= {int, float}
    return [] if fits else [f"{where}: {ours!r}, saved {saved!r}"]


SAID = {
    "chat_plain": "<think>a b c the fox yes no</think>",
    "chat_meta_no_logprobs": "<think>a b c the fox yes no</think>",
    "chat_sglext": "<think>a b c</think>",
    "abort_chat_result": "<think>the quick brown fox",
    "chat_regex_toolcall": '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call><|im_end|>',
    "chat_stop_string": "abc STOP def",
    "chat_stop_token": "yes<|im_end|>",
}

WHOLE = [
    "chat_full",
    "chat_plain",
    "chat_meta_no_logprobs",
    "chat_top_logprobs",
    "chat_return_flags",
    "chat_sglext",
    "chat_stop_string",
    "chat_stop_token",
    "chat_regex_toolcall",
    "chat_n2",
    "generate_ids_logprob",
    "generate_nologprob",
    "generate_batch",
]


@pytest.mark.parametrize("name", WHOLE)
async def test_whole_answers(client: Client, name: str) -> None:
    client.play(SAID.get(name, "the quick brown fox jumps over the lazy dog"))
    saved = SAVED[name]
    status, body = await client.send(saved["path"], request(name))
    assert status == 200
    assert same_shape(body, filled(saved["body"])) == []
    if "choices" in saved["body"]:
        for ours, theirs in zip(body["choices"], saved["body"]["choices"], strict=True):
            assert ours["finish_reason"] == theirs["finish_reason"]
            assert type(ours["matched_stop"]) is type(theirs["matched_stop"])


@pytest.mark.parametrize(("name", "hold"), [("abort_chat_result", 4), ("abort_generate_result", 4)])
async def test_aborted_answers(client: Client, name: str, hold: int) -> None:
    client.play(SAID.get(name, "the quick brown fox jumps over"))
    client.scheduler.hold = hold
    running = asyncio.ensure_future(client.send(SAVED[name]["path"], request(name)))
    while not client.scheduler.jobs or len(client.scheduler.jobs[0].output_ids) < hold:
        await asyncio.sleep(0)
    assert await client.send("/abort_request", {"rid": request(name)["rid"]}) == (200, "")
    status, body = await running
    assert status == 200
    assert same_shape(body, filled(SAVED[name]["body"])) == []


REFUSED = [
    "err_bad_temp",
    "err_bad_top_p",
    "err_context_too_long",
    "err_duplicate_rid",
    "err_empty_messages",
    "err_input_ids_empty",
    "err_input_plus_max_tokens",
    "err_max_tokens_too_big",
    "err_tool_choice_no_tools",
    "chat_no_max_tokens_near_ctx",
    "chat_4095",
    "chat_4096",
    "generate_err_none",
    "generate_err_too_long",
    "generate_input_plus_max_new",
]


@pytest.mark.parametrize("name", REFUSED)
async def test_refusals_word_for_word(client: Client, name: str) -> None:
    saved = SAVED[name]
    assert await client.send(saved["path"], request(name)) == (saved["status"], saved["body"])


@pytest.mark.parametrize("name", ["err_missing_messages", "err_input_ids_str"])
async def test_schema_errors_name_the_field(client: Client, name: str) -> None:
    status, body = await client.send(SAVED[name]["path"], request(name))
    saved = SAVED[name]["body"]
    assert status == 400
    assert {**body, "message": ""} == {**saved, "message": ""}
    assert body["message"].rstrip("}") == saved["message"].partition(", 'input'")[0]


@pytest.mark.parametrize("name", ["health", "model_info", "v1_models", "flush_cache"])
async def test_administration(client: Client, name: str) -> None:
    status, body = await client.send(SAVED[name]["path"], method="GET")
    assert status == 200
    assert same_shape(body, filled(SAVED[name]["body"])) == []


async def test_unknown_paths(client: Client) -> None:
    assert await client.send("/nope") == (404, SAVED["err_404"]["body"])
    assert await client.send("/v1/chat/completions", method="GET") == (405, {"detail": "Method Not Allowed"})


async def test_tokenize_and_detokenize(client: Client) -> None:
    status, body = await client.send("/tokenize", {"model": "x", "prompt": "the fox<|im_end|>"})
    assert status == 200
    assert same_shape(body, SAVED["tokenize"]["body"]) == []
    assert await client.send("/detokenize", {"tokens": body["tokens"]}) == (200, {"text": "the fox"})
    kept = {"tokens": [body["tokens"]], "skip_special_tokens": False}
    assert await client.send("/detokenize", kept) == (200, {"text": ["the fox<|im_end|>"]})


async def test_weight_version(client: Client) -> None:
    status, body = await client.send("/update_weight_version", {"new_version": "step-3"})
    assert (status, body) == (200, SAVED["update_weight_version"]["body"])
    client.play("yes<|im_end|>")
    reply = await client.chat(return_meta_info=True, logprobs=True)
    assert reply["choices"][0]["meta_info"]["weight_version"] == "step-3"
    assert (await client.send("/model_info", method="GET"))[1]["weight_version"] == "step-3"


def chunk_shapes(events: list[dict[str, Any]]) -> set[str]:
    """The distinct forms of a stream's chunks, values left out."""

    def form(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: form(item) for key, item in value.items()}
        if isinstance(value, list):
            return [form(value[0])] if value else []
        return None if value is None else type(value).__name__

    return {json.dumps(form(event)) for event in events}


@pytest.mark.parametrize("name", ["chat_stream_plain", "chat_stream_sglext", "chat_stream_tool"])
async def test_streamed_chunks(client: Client, name: str) -> None:
    client.play("<think>the quick brown fox jumps" if name != "chat_stream_tool" else "<tool_call>yes and no")
    saved = [json.loads(line.removeprefix("data: ")) for line in SAVED[name]["lines"] if "[DONE]" not in line]
    body = request(name)
    if name == "chat_stream_sglext":
        body["max_tokens"] = 6
    events = await client.stream("/v1/chat/completions", body)
    assert chunk_shapes(saved) - chunk_shapes(events) == set()


async def test_streamed_generate(client: Client) -> None:
    client.play("the quick brown fox jumps")
    saved = [json.loads(line.removeprefix("data: ")) for line in SAVED["generate_stream"]["lines"][:-1]]
    events = await client.stream("/generate", request("generate_stream"))
    assert events[-1]["text"].startswith(events[0]["text"])
    assert same_shape(events[0], saved[1]) == []
    ours, theirs = events[-1], saved[-1]
    ours["meta_info"].pop("response_sent_to_client_ts")
    assert same_shape(ours, theirs) == []


async def test_meta_info_is_refused_with_streaming(client: Client) -> None:
    saved = SAVED["chat_stream_meta"]
    status, body = await client.send("/v1/chat/completions", request("chat_stream_meta"))
    assert (status, body) == (400, json.loads(saved["lines"][0]))


async def test_a_full_queue_and_an_abort_in_it(client: Client) -> None:
    client.scheduler.hold = 0
    body = {"model": "x", "messages": [{"role": "user", "content": "hi"}], "logprobs": True, "return_meta_info": True}
    waiting = [asyncio.ensure_future(client.send("/v1/chat/completions", body)) for _ in range(2)]
    while len(client.scheduler.jobs) < 2:
        await asyncio.sleep(0)
    saved = SAVED["queue_over_queue"]
    assert await client.send("/v1/chat/completions", body) == (saved["status"], saved["body"])
    await client.send("/abort_request", {"abort_all": True})
    for status, reply in await asyncio.gather(*waiting):
        assert status == 200
        assert same_shape(reply, SAVED["queue_queued"]["body"]) == []
