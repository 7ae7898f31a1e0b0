"""Answers that reach the agent as they are sampled, and what of them is committed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from helpers.fake_engine import FakeEngine, Gate, says
from helpers.sessions import WEATHER, Serve, Talk, assistant, request, tool, user
from helpers.streams import Edit, added_up, finish_of, paused, streamed, streaming
from miles_core.testing.fake_stream import data_of, event
from server.test_routing_replay import LAYERS, moe, routed

__all__ = ["moe"]

CALLS = [("get_weather", '{"city": "Paris"}'), ("get_weather", '{"city": "Zürich", "days": [1, 2]}')]

SAID: dict[str, dict[str, Any]] = {
    "text": {"content": "Äpfel 🌊 and\n pears."},
    "reasoning": {"content": "Four.", "reasoning": "Two and two.\n\nSo four."},
    "calls": {"content": "Let me see.", "reasoning": "Hm.", "calls": CALLS},
    "call alone": {"content": "", "calls": CALLS[:1]},
    "cut off": {"content": "And so on", "finish": "length"},
}


@pytest.fixture(autouse=True)
def live(engine: FakeEngine) -> None:
    """The engine has parsers."""
    engine.streams = True


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as workers:
        yield workers


# -- the same turn, live and whole -----------------------------------------------------------------------------


def plain(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample to compare; what differs from run to run left out."""
    kept = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in sample.items() if k != "metadata"}
    return kept | {"shown": {k: v for k, v in sample["metadata"].items() if k != "lifecycle"}}


@pytest.mark.parametrize("name", SAID)
@pytest.mark.parametrize("history", ["linear", "tree"])
def test_a_live_turn_is_the_whole_one(serve: Serve, engine: FakeEngine, history: str, name: str) -> None:
    url = serve(history=history).url
    live, whole = Talk(url), Talk(url)
    reply, again = says(**SAID[name]), says("Done.")
    engine.plays(reply, reply, again, again)
    stream = streamed(live, [user("u")], tools=[WEATHER])
    assert (stream.response.status, stream.form, stream.events[-1]) == (200, "live", "[DONE]")
    answer = whole.ask(user("u"), tools=[WEATHER])
    message = added_up(stream.chunks)
    assert message == {key: value for key, value in answer.message.items() if value is not None or key != "tool_calls"}
    assert finish_of(stream.chunks) == [answer.json["choices"][0]["finish_reason"]]
    assert live.records[0]["response"]["choices"][0]["message"] == message
    if name == "cut off" and history == "tree":
        assert live.post([user("u"), message, user("more")]).status == 409
    else:
        added = tool("Warm.") if "calls" in SAID[name] else user("more")
        assert live.post([user("u"), message, added], tools=[WEATHER]).status == 200
        whole.ask(added, tools=[WEATHER])
        assert engine.turns[-2]["input_ids"] == engine.turns[-1]["input_ids"]
    ours, theirs = live.samples().samples, whole.samples().samples
    assert list(map(plain, ours)) == list(map(plain, theirs))
    assert ours[0]["rollout_log_probs"].tolist()[: len(reply.ids)] == reply.log_probs


def test_what_the_engine_is_asked(talk: Talk, engine: FakeEngine) -> None:
    streamed(
        talk, [user("u")], stream_options={"continuous_usage_stats": True}, top_k=3, rid="mine", return_meta_info=True
    )
    sent = engine.turns[0]
    assert {key: sent[key] for key in ("stream", "logprobs", "no_stop_trim", "top_k")} == {
        "stream": True, "logprobs": True, "no_stop_trim": False, "top_k": 3,
    }  # fmt: skip
    assert sent["stream_options"] == {"continuous_usage_stats": True, "include_usage": True}
    assert "return_meta_info" not in sent
    assert all(sent[f"return_{name}"] for name in ("output_ids_in_sglext", "cached_tokens_details"))
    assert sent["rid"] != "mine"
    assert talk.records[0]["request"] == sent
    headers = next(r.headers for r in engine.requests if r.path == "/v1/chat/completions")
    assert headers["X-SMG-Routing-Key"] == talk.id


def test_the_record_has_the_reply_that_the_chunks_amount_to(talk: Talk, engine: FakeEngine) -> None:
    reply = says("Yes.", reasoning="Hm.")
    engine.plays(reply)
    streamed(talk, [user("u")])
    whole, meant = talk.records[0]["response"], reply.json
    assert (whole["id"], whole["object"], whole["usage"]) == (meant["id"], "chat.completion", meant["usage"])
    (choice,), (theirs,) = whole["choices"], meant["choices"]
    meta, sent = choice["meta_info"], theirs["meta_info"]
    assert [entry[:2] for entry in meta["output_token_logprobs"]] == [e[:2] for e in sent["output_token_logprobs"]]
    for key in ("prompt_tokens", "completion_tokens", "cached_tokens", "weight_version", "finish_reason"):
        assert meta[key] == sent[key]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == reply.log_probs


# -- when what is sent -----------------------------------------------------------------------------------------


def before(text: str, gate: Gate) -> Edit:
    """Puts a gate before the first event that holds this."""

    def edit(events: list[bytes]) -> list[bytes | Gate]:
        at = next(n for n, sent in enumerate(events) if text.encode() in sent)
        return [*events[:at], gate, *events[at:]]

    return edit


def test_events_come_as_they_are_sampled(talk: Talk, engine: FakeEngine) -> None:
    gates = [Gate() for _ in range(3)]
    reply = says("one two three")

    def between(events: list[bytes]) -> list[bytes | Gate]:
        return [each for event, gate in zip(events, gates, strict=False) for each in (event, gate)] + list(events[3:])

    reply.edit = between
    engine.plays(reply)
    with streaming(talk, [user("u")]) as stream:
        for gate in gates:
            assert stream.next() is not None
            assert gate.entered.wait(10)
            assert talk.records == []
            gate.open()
        assert stream.rest()[-1] == "[DONE]"
    assert len(talk.records) == 1


def test_the_first_event_is_there_within_five_milliseconds(talk: Talk, engine: FakeEngine) -> None:
    """The best of many, since the machine may be busy; that nothing waits for a later event, others test."""
    delays = []
    for _ in range(60):
        gate, reply = Gate(), says("one two")
        reply.edit = paused(1, gate)
        engine.plays(reply)
        engine.written.clear()
        with streaming(talk, [user("u")]) as stream:
            stream.next()
            delays.append(time.perf_counter() - engine.written[0])
            gate.open()
            stream.rest()
        if delays[-1] < 0.005:
            return
    raise AssertionError(f"the quickest first event came after {min(delays) * 1000:.1f} ms")


@pytest.mark.parametrize("held", ["sglext", '"usage": {', "[DONE]"])
def test_the_end_is_held_back_until_the_turn_is_committed(talk: Talk, engine: FakeEngine, held: str) -> None:
    gate, reply = Gate(), says("All of it.")
    reply.edit = before(held, gate)
    engine.plays(reply)
    with streaming(talk, [user("u")], stream_options={"include_usage": True}) as stream:
        for _ in range(1 + len(reply.ids)):
            stream.next()
        assert added_up(stream.chunks)["content"] == "All of it."
        assert gate.entered.wait(10)
        assert talk.records == []
        gate.open()
        while not finish_of(stream.chunks):
            assert stream.next() is not None
        assert len(talk.records) == 1
        assert stream.rest()[-1] == "[DONE]"
    assert json.loads(stream.events[-2])["usage"]["total_tokens"] > 0


def test_usage_and_extensions_come_to_those_who_ask(talk: Talk, engine: FakeEngine) -> None:
    plain_stream = streamed(talk, [user("u")])
    assert not any(chunk.get("usage") or "sglext" in chunk for chunk in plain_stream.chunks)
    reply = says("Fine.")
    engine.plays(reply)
    asked = streamed(talk, [user("u")], return_output_ids_in_sglext=True, stream_options={"include_usage": True})
    ids, usage = asked.chunks[-2:]
    assert ids["sglext"] == {"output_ids": [reply.ids]}
    assert usage["usage"]["completion_tokens"] == len(reply.ids)


@pytest.mark.parametrize("first", [True, False], ids=["before the first event", "later"])
def test_keep_alive_comments_while_nothing_comes(serve: Serve, engine: FakeEngine, first: bool) -> None:
    talk = Talk(serve(keepalive_seconds=0.02).url)
    gate, reply = Gate(), says("At last.")
    if first:
        reply.gate = gate
    else:
        reply.edit = paused(4, gate)
    engine.plays(reply)
    with streaming(talk, [user("u")]) as stream:
        assert (stream.response.status, stream.form) == (200, "live")
        while stream.comments < 3:
            line = stream.response.readline()
            stream.comments += line.startswith(b":")
            if line.startswith(b"data: "):
                stream.events.append(line.decode().removeprefix("data: "))
        assert bool(stream.events) is not first
        gate.open()
        stream.rest()
    assert added_up(stream.chunks)["content"] == "At last."
    assert len(talk.records) == 1


# -- clients ---------------------------------------------------------------------------------------------------


def called(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]


def replay(message: Any) -> dict[str, Any]:
    """A message as clients send it back."""
    calls = [
        {"id": c.id, "type": "function", "function": {"name": c.function.name, "arguments": c.function.arguments}}
        for c in message.tool_calls or []
    ]
    return assistant(message.content, reasoning_content="Hm.", **({"tool_calls": calls} if calls else {}))


def test_the_clients_stream_helper_reads_calls_as_they_come(talk: Talk, engine: FakeEngine) -> None:
    engine.plays(says(**SAID["calls"]), says("Warm."))
    with openai.OpenAI(base_url=f"{talk.url}/v1", api_key="none", max_retries=0) as api:
        with api.chat.completions.stream(model="m", messages=[user("u")], tools=[WEATHER]) as stream:
            done = [e for e in stream if e.type == "tool_calls.function.arguments.done"]
            message = stream.get_final_completion().choices[0].message
        assert called(message) == CALLS
        assert [(e.name, e.arguments) for e in done] == CALLS
        again = [user("u"), replay(message), tool("1"), tool("2")]
        got = api.chat.completions.create(model="m", messages=again, tools=[WEATHER])
        assert got.choices[0].message.content == "Warm."
    assert len(talk.records) == 2, "the replayed message is the stored one"


async def test_the_async_client(url: str, engine: FakeEngine) -> None:
    talk = Talk(url)
    engine.plays(says(**SAID["reasoning"]))
    async with openai.AsyncOpenAI(base_url=f"{talk.url}/v1", api_key="none", max_retries=0) as api:
        stream = await api.chat.completions.create(
            model="m", messages=[user("u")], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "Four."
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert reasoning == SAID["reasoning"]["reasoning"]
    assert [chunk.usage.total_tokens for chunk in chunks if chunk.usage] == [
        talk.records[0]["response"]["usage"]["total_tokens"]
    ]


async def test_the_async_clients_stream_helper(url: str, engine: FakeEngine) -> None:
    talk = Talk(url)
    engine.plays(says(**SAID["calls"]))
    async with (
        openai.AsyncOpenAI(base_url=f"{talk.url}/v1", api_key="none", max_retries=0) as api,
        api.chat.completions.stream(model="m", messages=[user("u")], tools=[WEATHER]) as stream,
    ):
        assert called((await stream.get_final_completion()).choices[0].message) == CALLS


def joined_calls(events: list[bytes]) -> list[bytes]:
    """All parts of all calls in one chunk."""
    found = [n for n, sent in enumerate(events) if b'"tool_calls": [' in sent]
    chunk = data_of(events[found[0]])
    parts = [part for n in found for part in data_of(events[n])["choices"][0]["delta"]["tool_calls"]]
    chunk["choices"][0]["delta"]["tool_calls"] = parts
    rest = []
    for n in found[1:]:
        other = data_of(events[n])
        del other["choices"][0]["delta"]["tool_calls"]
        rest.append(event(other))
    return [*events[: found[0]], event(chunk), *rest, *events[found[-1] + 1 :]]


def without_index(events: list[bytes]) -> list[bytes]:
    """Calls without their index."""
    out = []
    for sent in events:
        data = data_of(sent)
        for choice in data["choices"] if data else ():
            for part in choice["delta"].get("tool_calls") or ():
                del part["index"]
        out.append(sent if data is None else event(data))
    return out


@pytest.mark.parametrize("odd", [joined_calls, without_index])
def test_every_call_of_a_chunk_has_an_index_of_its_own(talk: Talk, engine: FakeEngine, odd: Any) -> None:
    reply = says(**SAID["calls"])
    reply.edit = odd
    engine.plays(reply)
    stream = streamed(talk, [user("u")], tools=[WEATHER])
    message = added_up(stream.chunks)
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]] == CALLS
    stored = talk.records[0]["response"]["choices"][0]
    assert stored["message"]["tool_calls"] == message["tool_calls"]
    sent = [
        entry
        for c in stream.chunks
        for choice in c["choices"]
        for entry in (choice["logprobs"] or {}).get("content", ())
    ]
    assert sent == stored["logprobs"]["content"]


def test_a_long_stream_is_added_up_in_a_thread(talk: Talk, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles_core.server.live.LONG_ANSWER", 3)
    reply = says(**SAID["calls"])
    engine.plays(reply)
    stream = streamed(talk, [user("u")], tools=[WEATHER])
    assert stream.events[-1] == "[DONE]"
    (sample,) = talk.samples().samples
    assert sample["tokens"].tolist()[-len(reply.ids) :] == reply.ids


# -- turns that are answered whole -----------------------------------------------------------------------------


def test_an_engine_without_parsers_is_asked_for_whole_answers(serve: Serve, engine: FakeEngine) -> None:
    engine.streams = False
    stream = streamed(Talk(serve().url), [user("u")])
    assert (stream.form, added_up(stream.chunks)["content"]) == ("whole", "Fine.")
    assert "stream" not in engine.turns[0]


@pytest.mark.parametrize("settings", [{"exact_weight_versions": True}, {"indexer_replay": True}])
def test_settings_that_streams_cannot_keep(serve: Serve, engine: FakeEngine, settings: dict[str, Any]) -> None:
    talk = Talk(serve(**settings).url)
    engine.plays(says(meta={"indexer_topk": "AAAA", "indexer_topk_num_layers": 1}))
    assert streamed(talk, [user("u")]).form == "whole"
    assert "stream" not in engine.turns[0]
    assert len(talk.records) == 1


@pytest.mark.parametrize("field", ["return_token_ids", "return_prompt_token_ids", "return_indexer_topk"])
def test_fields_that_streams_do_not_carry(talk: Talk, engine: FakeEngine, field: str) -> None:
    assert streamed(talk, [user("u")], **{field: True}).form == "whole"
    assert engine.turns[0][field] is True


def test_rows_of_experts_come_with_live_turns_and_do_not_reach_the_agent(
    serve: Serve, engine: FakeEngine, moe: Path
) -> None:
    talk = Talk(serve(checkpoint=str(moe), routing_replay=True, incremental_replay=True).url)
    engine.plays(routed("One."), routed("Two."))
    first = streamed(talk, [user("a")], return_output_ids_in_sglext=True)
    second = streamed(talk, [user("a"), added_up(first.chunks), user("b")])
    for stream in (first, second):
        assert stream.form == "live"
        assert "routed_experts" not in "".join(stream.events)
    (sample,) = talk.samples().samples
    rows = sample["rollout_routed_experts"]
    assert rows.shape[:2] == (len(sample["tokens"]) - 1, LAYERS)
    assert (rows == np.arange(len(rows), dtype=np.int32)[:, None, None]).all()


# -- while it streams ------------------------------------------------------------------------------------------


def test_a_delete_during_a_stream(talk: Talk, engine: FakeEngine) -> None:
    gate, reply = Gate(), says("for nobody")
    reply.edit = paused(3, gate)
    engine.plays(reply)
    with streaming(talk, [user("u")]) as stream:
        stream.next()
        assert request(f"{talk.url}?records=none").status == 200
        assert talk.delete().status == 204
        assert request(talk.url).status == 404
        gate.open()
        assert stream.rest()[-1] == "[DONE]"
    assert added_up(stream.chunks)["content"] == "for nobody"
    assert talk.delete().status == 404


@pytest.mark.parametrize("history", ["linear", "tree"])
def test_another_turn_during_a_stream(serve: Serve, engine: FakeEngine, history: str) -> None:
    talk = Talk(serve(history=history).url)
    gate, reply = Gate(), says("slow")
    reply.edit = paused(3, gate)
    engine.plays(reply, says("quick"))
    with streaming(talk, [user("u")]) as stream:
        stream.next()
        talk.ask(user("u"))
        gate.open()
        assert stream.rest()[-1] == "[DONE]"
    assert added_up(stream.chunks)["content"] == "slow"
    assert len(talk.samples().samples[0]["tokens"]) > 0
    last = json.loads(talk.state("last"))["records"][0]["response"]["choices"][0]["message"]["content"]
    assert last == ("quick" if history == "linear" else "slow")


def test_streams_count_as_turns_in_flight(serve: Serve, engine: FakeEngine) -> None:
    server = serve(max_concurrent=1)
    talk, other = Talk(server.url), Talk(server.url)
    gate, reply = Gate(), says("one")
    reply.edit = paused(2, gate)
    engine.plays(reply)
    with streaming(talk, [user("u")]) as stream:
        stream.next()
        assert server.service.in_flight == 1
        assert other.post([user("u")]).status == 429
        assert other.post([user("u")], stream=True).status == 429
        gate.open()
        stream.rest()
    other.ask(user("u"))


def test_weights_that_change_during_a_stream_are_both_listed(
    serve: Serve, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miles_core.engine.facts.AGAIN_AFTER", 0.0)
    talk = Talk(serve().url)
    gate, reply = Gate(), says("one")
    reply.edit = paused(3, gate)
    engine.plays(says("zero"), reply)
    talk.history = [user("a"), added_up(streamed(talk, [user("a")]).chunks)]
    with streaming(talk, [*talk.history, user("b")]) as stream:
        stream.next()
        engine.weight_version = "w2"
        gate.open()
        stream.rest()
    assert talk.samples().samples[0]["weight_versions"] == ["w1", "w1", "w2"]
    meta = talk.records[1]["response"]["choices"][0]["meta_info"]
    assert (meta["weight_version"], meta["weight_versions"]) == ("w2", [{"version": "w1"}, {"version": "w2"}])
