"""Clients that hang up, deletes and rivals during a turn."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from helpers.fake_engine import FakeEngine, Gate, says
from helpers.operator import ADMIN_KEY, Operator
from helpers.sessions import Serve, Talk, request, user


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as workers:
        yield workers


def opened(talk: Talk, stream: bool = False) -> socket.socket:
    """A socket on which a turn was asked for, with the answer unread."""
    parts = urlsplit(talk.chat_url)
    body = json.dumps({"messages": [*talk.history, user("gone")], "stream": stream}).encode()
    connection = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=10)
    head = f"POST {parts.path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("keepalive", [15.0, 0.02], ids=["quiet", "keep-alive"])
def test_a_client_that_hangs_up_aborts_its_request(
    serve: Serve, engine: FakeEngine, stream: bool, keepalive: float
) -> None:
    talk = Talk(serve(keepalive_seconds=keepalive).url)
    talk.ask(user("first"))
    before = talk.state()
    gate = Gate()
    engine.plays(says("late", gate=gate))
    connection = opened(talk, stream)
    assert gate.entered.wait(10)
    if stream and keepalive < 1:
        seen = b""
        while b": keep-alive" not in seen:
            seen += connection.recv(1000)
    connection.close()
    rid = engine.turns[-1]["rid"]
    engine.wait_for(lambda: engine.aborted == [rid])
    gate.open()
    talk.ask(user("still here"))
    assert len(talk.records) == 2
    assert json.loads(before)["records"] == talk.records[:1]


def test_an_answer_nobody_read_is_dropped_by_the_retry(talk: Talk, engine: FakeEngine) -> None:
    """The turn was committed before the client lost it; it asks again for the same."""
    talk.ask(user("u1"))
    lost = engine.turns[-1]["input_ids"]
    talk.history = []
    talk.ask(user("u1"))
    assert engine.turns[-1]["input_ids"] == lost
    assert len(talk.records) == 1


def test_a_delete_during_a_turn(talk: Talk, engine: FakeEngine, pool: ThreadPoolExecutor) -> None:
    gate = Gate()
    engine.plays(says("for nobody", gate=gate))
    turn = pool.submit(talk.post, [user("u")])
    assert gate.entered.wait(10)
    assert request(f"{talk.url}?records=none").status == 200
    assert talk.delete().status == 204
    assert request(talk.url).status == 404
    assert talk.post([user("u")]).status == 404
    gate.open()
    answer = turn.result(10)
    assert answer.status == 200
    assert answer.message["content"] == "for nobody"
    assert talk.delete().status == 404


@pytest.mark.parametrize("path", ["v1/chat/completions", "tokenize"])
def test_a_delete_while_a_request_comes_in_leaves_no_session_with_its_worker(
    serve: Serve, engine: FakeEngine, path: str
) -> None:
    server = serve(admin_api_key=ADMIN_KEY)
    talk, operator = Talk(server.url), Operator(server.url)
    parts = urlsplit(f"{talk.url}/{path}")
    body = json.dumps({"messages": [user("u")]}).encode()
    head = f"POST {parts.path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n"
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=10) as connection:
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 100 "), "the session was found, and the body is waited for"
        assert talk.delete().status == 204
        connection.sendall(body)
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
    assert operator.engines()[engine.url]["sessions"] == 0


def test_of_turns_at_once_only_one_is_committed(talk: Talk, engine: FakeEngine, pool: ThreadPoolExecutor) -> None:
    talk.ask(user("first"))
    gates = [Gate() for _ in range(3)]
    engine.plays(*[says(f"answer {n}", gate=gate) for n, gate in enumerate(gates)])
    turns = []
    for number, gate in enumerate(gates):
        turns.append(pool.submit(talk.post, [*talk.history, user(f"rival {number}")]))
        assert gate.entered.wait(10)
    before = talk.state()
    gates[1].open()
    assert turns[1].result(10).message["content"] == "answer 1"
    after = talk.state()
    assert after != before
    for number in (0, 2):
        gates[number].open()
        assert turns[number].result(10).message["content"] == f"answer {number}"
    assert talk.state() == after
    contents = [r["response"]["choices"][0]["message"]["content"] for r in talk.records]
    assert contents == ["Fine.", "answer 1"]
    talk.history = [*talk.history, user("rival 1"), turns[1].result().message]
    talk.ask(user("on"))


def test_a_read_is_not_blocked_by_a_turn(talk: Talk, engine: FakeEngine, pool: ThreadPoolExecutor) -> None:
    talk.ask(user("first"))
    gate = Gate()
    engine.plays(says(gate=gate))
    turn = pool.submit(talk.post, [*talk.history, user("slow")])
    assert gate.entered.wait(10)
    assert len(talk.records) == 1
    assert len(talk.samples().samples) == 1
    gate.open()
    assert turn.result(10).status == 200
    assert len(talk.records) == 2
