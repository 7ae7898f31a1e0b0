"""Event streams, read with the official client and raw."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from helpers.fake_engine import FakeEngine, Gate, Reply, refuses, says
from helpers.sessions import WEATHER, Serve, Talk, assistant, request, tool, user

CALLS = [("get_weather", '{"city": "Paris"}'), ("get_weather", '{"city": "Zürich"}')]


def client(talk: Talk) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{talk.url}/v1", api_key="none", max_retries=0)


def collected(chunks: Iterable[Any]) -> dict[str, Any]:
    """The message that the deltas of chunks amount to, as a client adds them up."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": {}}
    for chunk in chunks:
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            message["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or []:
                assert call.index not in message["tool_calls"]
                message["tool_calls"][call.index] = call
            message["finish_reason"] = choice.finish_reason
    return message


def events(body: bytes) -> list[str]:
    return [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]


def test_without_stream(talk: Talk, engine: FakeEngine) -> None:
    engine.plays(says("", calls=CALLS))
    with client(talk) as api:
        got = api.chat.completions.create(model="m", messages=[user("u")], tools=[WEATHER])
    message = got.choices[0].message
    assert message.content == ""
    assert [(c.function.name, c.function.arguments) for c in message.tool_calls or []] == CALLS
    assert got.choices[0].finish_reason == "tool_calls"
    assert got.usage is not None


def test_stream_gives_the_same_message_and_its_replay_matches(talk: Talk, engine: FakeEngine) -> None:
    engine.plays(says("Let me see.\n", reasoning="Hm.", calls=CALLS), says("Warm."))
    with client(talk) as api:
        stream = api.chat.completions.create(
            model="m",
            messages=[user("u")],
            tools=[WEATHER],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    got = collected(chunks)
    assert got["content"] == "Let me see.\n"
    assert got["reasoning_content"] == "Hm."
    assert sorted(got["tool_calls"]) == [0, 1]
    assert [(c.function.name, c.function.arguments) for _, c in sorted(got["tool_calls"].items())] == CALLS
    assert got["finish_reason"] == "tool_calls"
    assert [c.usage.total_tokens for c in chunks if c.usage] == [
        json.loads(talk.state())["records"][0]["response"]["usage"]["total_tokens"]
    ]
    calls = [
        {"id": c.id, "type": "function", "function": {"name": c.function.name, "arguments": c.function.arguments}}
        for _, c in sorted(got["tool_calls"].items())
    ]
    replay = assistant(got["content"], reasoning_content="Hm.", tool_calls=calls)
    assert talk.post([user("u"), replay, tool("1"), tool("2")], tools=[WEATHER]).status == 200
    assert len(talk.records) == 2


async def test_stream_with_the_async_client(url: str, engine: FakeEngine) -> None:
    talk = Talk(url)
    engine.plays(says("Äpfel 🌊"))
    async with openai.AsyncOpenAI(base_url=f"{talk.url}/v1", api_key="none", max_retries=0) as api:
        stream = await api.chat.completions.create(model="m", messages=[user("u")], stream=True)
        chunks = [chunk async for chunk in stream]
    assert collected(chunks)["content"] == "Äpfel 🌊"
    assert not any(chunk.usage for chunk in chunks)


def test_the_clients_stream_helper(talk: Talk, engine: FakeEngine) -> None:
    engine.plays(says("", calls=CALLS))
    with (
        client(talk) as api,
        api.chat.completions.stream(model="m", messages=[user("u")], tools=[WEATHER]) as stream,
    ):
        message = stream.get_final_completion().choices[0].message
    assert [(c.function.name, c.function.arguments) for c in message.tool_calls or []] == CALLS


def test_raw_events(talk: Talk, engine: FakeEngine) -> None:
    answer = talk.post([user("u")], stream=True, stream_options={"include_usage": True})
    assert answer.status == 200
    assert (answer.header("content-type") or "").startswith("text/event-stream")
    assert answer.header("x-miles-stream") == "whole"
    *data, done = events(answer.body)
    assert done == "[DONE]"
    chunks = [json.loads(text) for text in data]
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] > 0
    sent = engine.turns[0]
    assert "stream" not in sent
    assert "stream_options" not in sent


@pytest.mark.parametrize("finish", ["length", "stop", "tool_calls"])
def test_the_finish_reason_is_the_engines(talk: Talk, engine: FakeEngine, finish: str) -> None:
    engine.plays(says("x", finish=finish))
    chunks = [json.loads(text) for text in events(talk.post([user("u")], stream=True).body)[:-1]]
    assert chunks[-1]["choices"][0]["finish_reason"] == finish


def test_an_error_before_the_first_event_keeps_its_type_for_the_client(talk: Talk, engine: FakeEngine) -> None:
    engine.plays(refuses(503, b"<html>down</html>", kind="text/html"), refuses(429, b"{}", ("Retry-After", "7")))
    with client(talk) as api:
        for fault in (openai.InternalServerError, openai.RateLimitError):
            with pytest.raises(fault):
                api.chat.completions.create(model="m", messages=[user("u")], stream=True)
        with pytest.raises(openai.BadRequestError) as refused:
            api.chat.completions.create(model="m", messages=[user("u")], stream=True, n=2)
        assert "n=2" in str(refused.value.body)


# -- answers that take long ------------------------------------------------------------------------------------


def late(serve: Serve, engine: FakeEngine, reply: Reply) -> tuple[Talk, bytes]:
    """The body of a stream whose reply comes after a few keep-alive comments."""
    talk = Talk(serve(keepalive_seconds=0.02).url)
    reply.gate = Gate()
    engine.plays(reply)
    connection = http.client.HTTPConnection(urlsplit(talk.url).netloc, timeout=10)
    body = json.dumps({"messages": [user("u")], "stream": True, "stream_options": {"include_usage": True}})
    try:
        connection.request("POST", urlsplit(talk.chat_url).path, body)
        response = connection.getresponse()
        assert response.status == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        seen = b"".join(response.readline() for _ in range(6))
        assert seen == b": keep-alive\n\n" * 3
        reply.gate.open()
        return talk, response.read()
    finally:
        connection.close()


def without_comments(body: bytes) -> list[str]:
    return [event for event in body.decode().split("\n\n") if event and not event.startswith(":")]


def test_keep_alive_comments_then_the_answer(serve: Serve, engine: FakeEngine) -> None:
    talk, body = late(serve, engine, says("At last."))
    got = without_comments(body)
    assert got[-1] == "data: [DONE]"
    assert json.loads(got[0].removeprefix("data: "))["choices"][0]["delta"]["content"] == "At last."
    assert len(talk.records) == 1


@pytest.mark.parametrize(
    ("reply", "text", "code"),
    [
        (says(meta={"completion_tokens": 1}), "completion_tokens=1", 502),
        (refuses(400, b"too long"), "too long", 400),
        (Reply(body=b"{}", cut=1), "engine", 502),
    ],
    ids=["lacking", "refused", "cut"],
)
def test_a_late_error_is_an_event(serve: Serve, engine: FakeEngine, reply: Reply, text: str, code: int) -> None:
    engine.always = lambda body: Reply(body=b"{}", cut=1)
    talk, body = late(serve, engine, reply)
    (event,) = without_comments(body)
    kind, _, data = event.partition("\n")
    assert kind == "event: error"
    error = json.loads(data.removeprefix("data: "))
    assert text in error["error"]
    assert error["code"] == code
    assert talk.records == []
    engine.reset()
    talk.ask(user("u"))


def test_the_client_library_reads_past_comments(serve: Serve, engine: FakeEngine) -> None:
    talk = Talk(serve(keepalive_seconds=0.01).url)
    gate = Gate()
    engine.plays(says("Slow.", gate=gate))
    with client(talk) as api:
        stream = api.chat.completions.create(model="m", messages=[user("u")], stream=True)
        gate.open()
        assert collected(stream)["content"] == "Slow."


def test_the_concatenated_deltas_are_the_stored_message(talk: Talk, engine: FakeEngine) -> None:
    engine.plays(says("Text.", reasoning="Why.", calls=CALLS))
    raw = talk.post([user("u")], stream=True, tools=[WEATHER]).body
    delta = json.loads(events(raw)[0])["choices"][0]["delta"]
    stored = talk.records[0]["response"]["choices"][0]["message"]
    assert delta == {key: value for key, value in stored.items() if value is not None}
    assert request(f"{talk.url}?records=none").status == 200
