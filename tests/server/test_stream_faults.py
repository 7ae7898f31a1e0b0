"""Streams that go wrong: what the agent is told, and that nothing of them is kept."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from helpers.fake_engine import FakeEngine, Gate, Reply, fake_engine, refuses, says
from helpers.sessions import Serve, Talk, user
from helpers.streams import added_up, finish_of, paused, streamed, streaming
from miles_core.testing.fake_stream import data_of, event, fault

Edit = Callable[[list[bytes]], list[bytes]]


@pytest.fixture(autouse=True)
def live(engine: FakeEngine) -> None:
    """The engine has parsers."""
    engine.streams = True


def changed(change: Callable[[Any], None]) -> Edit:
    """Every chunk changed in place."""

    def edit(events: list[bytes]) -> list[bytes]:
        out = []
        for sent in events:
            data = data_of(sent)
            if data is not None:
                change(data)
            out.append(sent if data is None else event(data))
        return out

    return edit


def without(text: str) -> Edit:
    """No event that holds this."""
    return lambda events: [sent for sent in events if text.encode() not in sent]


def instead(at: int, sent: bytes) -> Edit:
    """Another event in the place of one, and none after it but `[DONE]`."""
    return lambda events: [*events[:at], sent, events[-1]]


def log_probs(change: Callable[[list[Any]], Any]) -> Edit:
    """The first token's entries of log-probs changed."""

    def edit(events: list[bytes]) -> list[bytes]:
        data = data_of(events[1])
        part = data["choices"][0]["logprobs"]
        part["content"] = change(part["content"])
        return [events[0], event(data), *events[2:]]

    return edit


def ids(change: Callable[[list[Any]], Any]) -> Edit:
    """The ids changed."""

    def apply(data: Any) -> None:
        if "sglext" in data:
            data["sglext"]["output_ids"] = change(data["sglext"]["output_ids"])

    return changed(apply)


def raw_number(text: str) -> Edit:
    """A number of the first token's log-probability as no JSON writer writes it."""

    def edit(events: list[bytes]) -> list[bytes]:
        value = data_of(events[1])["choices"][0]["logprobs"]["content"][0]["logprob"]
        return [events[0], events[1].replace(json.dumps(value).encode(), text.encode()), *events[2:]]

    return edit


INEXACT: dict[str, tuple[Edit, str]] = {
    "no ids": (without("sglext"), "lacks sglext.output_ids"),
    "ids null": (ids(lambda lists: None), "lacks sglext.output_ids"),
    "ids of no choice": (ids(lambda lists: []), "lacks sglext.output_ids"),
    "an id too few": (ids(lambda lists: [lists[0][:-1]]), "log-probabilities for"),
    "a log-prob too few": (log_probs(lambda content: None), "log-probabilities for"),
    "a log-prob twice": (log_probs(lambda content: content * 2), "log-probabilities for"),
    "ids shifted": (ids(lambda lists: [[*lists[0][1:], lists[0][0]]]), "whose id"),
}

ODD: dict[str, tuple[Edit, str]] = {
    "the engine's error": (instead(4, fault("CUDA out of memory")), "CUDA out of memory"),
    "not JSON": (instead(4, b"data: {oops\n\n"), "not JSON"),
    "no object": (instead(4, b"data: [1]\n\n"), "no object"),
    "no choices": (instead(4, b'data: {"id": "x"}\n\n'), "without a list of choices"),
    "another choice": (instead(4, event({"choices": [{"index": 1, "delta": {}}]})), "another choice"),
    "content no string": (instead(4, event({"choices": [{"delta": {"content": 3}}]})), "content that is no string"),
    "calls no list": (instead(4, event({"choices": [{"delta": {"tool_calls": {}}}]})), "tool_calls that are no list"),
    "call no object": (instead(4, event({"choices": [{"delta": {"tool_calls": [3]}}]})), "call that is no object"),
    "log-probs no list": (instead(4, event({"choices": [{"logprobs": {"content": 3}}]})), "no list"),
    "nested deep": (
        instead(4, b'data: {"choices": [], "x": ' + b"[" * 200 + b"]" * 200 + b"}\n\n"), "nested more than",
    ),
    "no end": (lambda events: events[:-1], "without [DONE]"),
    "half an event": (lambda events: [*events[:4], b'data: {"choices": []}'], "without [DONE]"),
    "no finish": (without('"finish_reason": "stop"'), "no finish_reason"),
    "NaN": (raw_number("NaN"), "not JSON"),
    "log-prob null": (raw_number("null"), "log-probability None"),
    "an id that is text": (ids(lambda lists: [["7", *lists[0][1:]]]), "token id '7'"),
    "an id too large": (ids(lambda lists: [[2**30, *lists[0][1:]]]), "outside the vocabulary"),
    "no count": (changed(lambda data: data.pop("usage", None)), "completion_tokens=None"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*INEXACT, *ODD])
def test_a_fault_after_the_first_event_is_an_error_event(serve: Serve, engine: FakeEngine, name: str) -> None:
    talk = Talk(serve().url)
    talk.ask(user("one"))
    before = talk.state()
    edit, text = {**INEXACT, **ODD}[name]
    reply = says("Some words.")
    reply.edit = edit
    engine.plays(reply)
    stream = streamed(talk, [*talk.history, user("two")])
    assert (stream.response.status, stream.form) == (200, "live")
    *_, last = stream.events
    kind, _, data = last.partition("\n")
    assert kind == "event: error"
    error = json.loads(data)
    assert text in error["error"]
    assert error["code"] == (500 if name == "the engine's error" else 502)
    assert finish_of(stream.chunks) == []
    assert talk.state() == before
    again = streamed(talk, [*talk.history, user("two")])
    assert again.form == ("whole" if name in INEXACT else "live")
    assert len(talk.records) == 2


def test_a_stream_that_is_cut_off(talk: Talk, engine: FakeEngine) -> None:
    engine.plays(says("Some words.", meta={}))
    engine.script[0].cut = 5  # type: ignore[union-attr]
    stream = streamed(talk, [user("u")])
    assert stream.events[-1].startswith("event: error")
    assert engine.url in stream.events[-1]
    assert len(engine.turns) == 1, "what the agent has seen of it cannot be taken back"
    assert talk.records == []
    assert streamed(talk, [user("u")]).form == "live"


def test_the_client_library_raises_on_an_error_event(talk: Talk, engine: FakeEngine) -> None:
    reply = says("Some words.")
    reply.edit = instead(4, fault("CUDA out of memory"))
    engine.plays(reply)
    with openai.OpenAI(base_url=f"{talk.url}/v1", api_key="none", max_retries=0) as api:
        stream = api.chat.completions.create(model="m", messages=[user("u")], stream=True)
        with pytest.raises(openai.APIError) as raised:
            list(stream)
    assert "CUDA out of memory" in str(raised.value.body)


# -- before the first event ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "status", "text"),
    [
        (refuses(400, b'{"object":"error","message":"too long","code":400}'), 400, "too long"),
        (refuses(503, b"<html>down</html>", kind="text/html"), 503, "down"),
    ],
)
def test_a_refusal_keeps_its_status_and_type(
    talk: Talk, engine: FakeEngine, reply: Reply, status: int, text: str
) -> None:
    engine.plays(reply)
    answer = talk.post([user("u")], stream=True)
    assert (answer.status, answer.body) == (status, reply.body)
    assert answer.header("content-type") == dict(reply.headers)["Content-Type"]
    assert talk.records == []


def test_an_error_as_the_first_event_is_an_error_with_its_status(talk: Talk, engine: FakeEngine) -> None:
    reply = says()
    reply.edit = lambda events: [fault("queue full", 503, "ServiceUnavailable"), events[-1]]
    engine.plays(reply)
    answer = talk.post([user("u")], stream=True)
    assert (answer.status, answer.header("content-type")) == (503, "application/json")
    assert "queue full" in answer.error
    assert answer.json["type"] == "ServiceUnavailable"
    assert talk.records == []


def test_a_whole_answer_to_a_streamed_turn_is_checked(talk: Talk, engine: FakeEngine) -> None:
    """What stands between may not know streams."""
    engine.plays(Reply(body=b'{"choices": [{"message": {"role": "assistant", "content": "x"}}]}'))
    answer = talk.post([user("u")], stream=True)
    assert answer.status == 502
    assert "meta_info" in answer.error


@pytest.mark.parametrize("sent", [0, 1], ids=["the head alone", "a comment"])
def test_an_engine_that_breaks_off_before_the_first_event_is_asked_again(
    serve: Serve, engine: FakeEngine, sent: int
) -> None:
    with fake_engine() as other:
        other.streams = True
        talk = Talk(serve(engine_urls=(engine.url, other.url)).url)
        broken = says()
        broken.edit = lambda events: [b": soon\n\n", *events]
        broken.cut = sent
        for each in (engine, other):
            each.always = lambda body: says("Got it.")
        first = talk.ask(user("hello"))
        here, there = (engine, other) if engine.turns else (other, engine)
        here.plays(broken)
        stream = streamed(talk, [user("hello"), first.message, user("u")])
        assert (stream.form, added_up(stream.chunks)["content"]) == ("live", "Got it.")
        (failed,), (second,) = here.turns[1:], there.turns
        assert failed["rid"] != second["rid"]
        assert failed["input_ids"] == second["input_ids"]
        here.wait_for(lambda: here.aborted == [failed["rid"]])
        assert talk.records[1]["request"]["rid"] == second["rid"]


def test_a_worker_that_cannot_stream_takes_over_with_a_whole_answer(serve: Serve, engine: FakeEngine) -> None:
    with fake_engine() as other:
        talk = Talk(serve(engine_urls=(engine.url, other.url)).url)
        other.streams = engine.streams
        talk.ask(user("hello"))
        here, there = (engine, other) if engine.turns else (other, engine)
        there.streams = False
        here.plays(Reply(body=b"cut off", cut=0))
        stream = streamed(talk, [*talk.history, user("u")])
        assert (stream.form, stream.events[-1]) == ("whole", "[DONE]")
        assert "stream" not in there.turns[0]
        assert len(talk.records) == 2


def test_an_engine_that_is_gone(serve: Serve) -> None:
    with fake_engine() as engine:
        engine.streams = True
        talk = Talk(serve(engine_urls=(engine.url,)).url)
        talk.ask(user("one"))
        engine.stop()
        answer = talk.post([*talk.history, user("two")], stream=True)
        assert answer.status == 502
        assert engine.url in answer.error
        engine.start()
        assert streamed(talk, [*talk.history, user("two")]).events[-1] == "[DONE]"


# -- the end of somebody's patience ----------------------------------------------------------------------------


def test_an_aborted_stream_goes_to_the_client_and_is_not_kept(talk: Talk, engine: FakeEngine) -> None:
    talk.ask(user("one"))
    records = talk.records
    reply = says("half", finish="abort")
    reply.edit = without("sglext")
    engine.plays(reply)
    stream = streamed(talk, [*talk.history, user("two")])
    assert finish_of(stream.chunks) == ["abort"]
    assert (added_up(stream.chunks)["content"], stream.events[-1]) == ("half", "[DONE]")
    assert talk.records == records
    assert talk.metadata["aborted"] is True
    assert [s["status"] for s in talk.samples().samples] == ["aborted"]
    assert finish_of(streamed(talk, [*talk.history, user("two")]).chunks) == ["stop"]
    assert engine.turns[1]["input_ids"] == engine.turns[2]["input_ids"]
    assert "aborted" not in talk.metadata


@pytest.mark.parametrize("read", [1, 3])
def test_a_client_that_leaves_aborts_the_engines_request(talk: Talk, engine: FakeEngine, read: int) -> None:
    talk.ask(user("first"))
    before = talk.state()
    gate, reply = Gate(), says("nobody reads this")
    reply.edit = paused(4, gate)
    engine.plays(reply)
    with streaming(talk, [*talk.history, user("gone")]) as stream:
        for _ in range(read):
            stream.next()
        assert gate.entered.wait(10)
    rid = engine.turns[-1]["rid"]
    engine.wait_for(lambda: engine.aborted == [rid])
    gate.open()
    assert talk.state() == before
    talk.ask(user("still here"))


def test_a_client_that_leaves_before_the_first_event(talk: Talk, engine: FakeEngine) -> None:
    gate = Gate()
    engine.plays(says("nobody", gate=gate))
    connection = http.client.HTTPConnection(urlsplit(talk.url).netloc, timeout=30)
    connection.request("POST", urlsplit(talk.chat_url).path, json.dumps({"messages": [user("u")], "stream": True}))
    assert gate.entered.wait(10)
    connection.close()
    engine.wait_for(lambda: engine.aborted == [engine.turns[-1]["rid"]])
    gate.open()
    assert talk.records == []


def test_infinite_numbers_are_no_log_probs(talk: Talk, engine: FakeEngine) -> None:
    reply = says("Some words.")
    reply.edit = raw_number("1e999")
    engine.plays(reply)
    stream = streamed(talk, [user("u")])
    assert stream.events[-1].startswith("event: error")
    assert talk.records == []
