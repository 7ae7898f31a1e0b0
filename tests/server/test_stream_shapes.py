"""Streams that say the same in other bytes, and clients that leave at any point of one."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from helpers.fake_engine import FakeEngine, Gate, Reply, says
from helpers.operator import ADMIN_KEY, Operator
from helpers.sessions import WEATHER, Serve, Talk, user
from helpers.streams import Edit, added_up, finish_of, streamed, streaming
from miles_core.testing.fake_stream import data_of, event


@pytest.fixture(autouse=True)
def live(engine: FakeEngine) -> None:
    """The engine has parsers."""
    engine.streams = True


def bytewise(events: list[bytes]) -> list[bytes]:
    return [bytes([one]) for one in b"".join(events)]


def ends(end: bytes, size: int) -> Edit:
    """Other ends of lines, in pieces of so many bytes."""

    def edit(events: list[bytes]) -> list[bytes]:
        raw = b"".join(events).replace(b"\n", end)
        return [raw[at : at + size] for at in range(0, len(raw), size)]

    return edit


def each(change: Callable[[bytes], bytes]) -> Edit:
    return lambda events: [change(one) for one in events]


def several_lines(sent: bytes) -> bytes:
    return sent.replace(b", ", b",\ndata: ")


def ids_at(place: int) -> Edit:
    """The chunk with the ids somewhere else."""

    def edit(events: list[bytes]) -> list[bytes]:
        rest = [one for one in events if b'"output_ids"' not in one]
        ids = next(one for one in events if b'"output_ids"' in one)
        rest.insert(place % len(rest), ids)
        return rest

    return edit


def twice(text: bytes) -> Edit:
    """Events that hold this are sent a second time."""
    return lambda events: [one for sent in events for one in ([sent, sent] if text in sent else [sent])]


def merged(events: list[bytes]) -> list[bytes]:
    """The ids in the chunk that says why it ended."""
    ids = data_of(next(one for one in events if b'"output_ids"' in one))["sglext"]
    found = []
    for one in events:
        if b'"output_ids"' in one:
            continue
        if b'"finish_reason": "' in one:
            one = event({**data_of(one), "sglext": ids})
        found.append(one)
    return found


def finish_again(events: list[bytes]) -> list[bytes]:
    """Why it ended, once more in a chunk that adds nothing."""
    last = next(data_of(one) for one in events if b'"finish_reason": "' in one)
    last["choices"][0].update(delta={"content": None}, logprobs=None)
    return [*events[:-1], event(last), events[-1]]


SAME: dict[str, Edit] = {
    "byte by byte": bytewise,
    "CR LF": ends(b"\r\n", 10**6),
    "CR LF, byte by byte": ends(b"\r\n", 1),
    "CR": ends(b"\r", 7),
    "comments": each(lambda sent: b": ping\n\n:\n" + sent + b": pong\n"),
    "other fields": each(lambda sent: b"event: message\nid: 7\nretry: 10\nunknown\n" + sent),
    "no space": each(lambda sent: sent.replace(b"data: ", b"data:", 1)),
    "data of several lines": each(several_lines),
    "one piece": lambda events: [b"".join(events)],
    "ids first": ids_at(0),
    "ids in the middle": ids_at(3),
    "ids with the end": merged,
    "ids twice": twice(b'"output_ids"'),
    "counts twice": twice(b'"usage": {'),
    "the end twice": finish_again,
    "more behind the end": lambda events: [*events, b"data: {oops\n\n", b"junk"],
}


@pytest.mark.parametrize("name", SAME)
def test_a_stream_in_other_bytes_is_the_same_turn(serve: Serve, engine: FakeEngine, name: str) -> None:
    talk = Talk(serve().url)
    reply = says("Let me see.\nÄ 🌊", reasoning="Hm.", calls=[("get_weather", '{"city": "Zürich"}')])
    reply.edit = SAME[name]
    engine.plays(reply)
    stream = streamed(talk, [user("u")], tools=[WEATHER])
    assert (stream.form, stream.events[-1]) == ("live", "[DONE]")
    message = added_up(stream.chunks)
    (record,) = talk.records
    assert record["response"]["choices"][0]["message"] == message
    assert message["content"] == "Let me see.\nÄ 🌊"
    assert set(finish_of(stream.chunks)) == {"tool_calls"}
    (sample,) = talk.samples().samples
    assert sample["tokens"].tolist()[-len(reply.ids) :] == reply.ids
    assert sample["rollout_log_probs"].tolist() == reply.log_probs


# -- leaving ---------------------------------------------------------------------------------------------------


def slowed(at: int, gate: Gate) -> Edit:
    return lambda events: [*events[:at], gate, *events[at:]]


def test_clients_that_leave_at_every_point(serve: Serve, engine: FakeEngine) -> None:
    """Whatever was sent by then, the engine is told, nothing is committed, and nothing goes on in the server."""
    server = serve(admin_api_key=ADMIN_KEY, keepalive_seconds=0.05)
    operator, chance = Operator(server.url), random.Random(5)
    gates: list[Gate] = []

    def held(body: Any) -> Reply:
        reply, gate = says("one two three"), Gate()
        gates.append(gate)
        reply.edit = slowed(chance.randrange(1, 7), gate)
        if chance.random() < 0.3:
            reply.gate = gate
        return reply

    engine.always = held
    talks = [Talk(server.url) for _ in range(24)]

    def leaves(talk: Talk) -> None:
        with streaming(talk, [user("u")]) as stream:
            for _ in range(chance.randrange(3)):
                stream.response.readline()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(leaves, talks))
    deadline = time.monotonic() + 30
    while len(set(engine.aborted)) < len(talks) or server.service.in_flight:
        assert time.monotonic() < deadline, (len(engine.aborted), server.service.in_flight)
        time.sleep(0.01)
    assert set(engine.aborted) == {body["rid"] for body in engine.turns}
    assert operator.turns() == {"client_left": len(talks)}
    assert operator.metrics()["miles_turns_in_flight"] == 0
    assert {row["in_flight"] for row in operator.engines().values()} == {0}
    assert [talk.records for talk in talks] == [[]] * len(talks)
    for gate in gates:
        gate.open()
    engine.always = lambda body: says()
    talks[0].ask(user("again"))
