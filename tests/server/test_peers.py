"""What one process of a server asks of the others, with two of them in one event loop."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing
from typing import Any

import pytest
import uvicorn

from miles_core.server.board import SESSIONS, UP, Board
from miles_core.server.handover import connections, take_over
from miles_core.server.http import Request, json_reply
from miles_core.server.peers import CLIENT, FRESH, Link, Peers

Make = Callable[[int], list[Peers]]


@pytest.fixture
def peers_of() -> Iterator[Make]:
    """Makes the processes of a server of so many, all of them up."""
    with ExitStack() as stack:

        def make(count: int) -> list[Peers]:
            board, links = Board(count), [stack.enter_context(closing(Link())) for _ in range(count)]
            for number in range(count):
                board.put(number, UP, 1)
            return [Peers(number, board, links) for number in range(count)]

        yield make


def tells(number: int) -> Any:
    """An application that says who it is and what it was asked."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        body = await request.body(10**7)
        told = {
            "number": number, "internal": request.internal, "method": request.method,
            "target": request.target.decode(), "body": body.decode(), "x": request.header(b"x"),
        }  # fmt: skip
        await json_reply(told, 200 + number).send(request, send)

    return app


@asynccontextmanager
async def serving(peers: Peers) -> AsyncGenerator[None, None]:
    config = uvicorn.Config(
        tells(peers.number), http=connections(peers), lifespan="off", port=0, log_level="error", access_log=False
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110  # uvicorn has no event for it
        await asyncio.sleep(0.001)
    take_over(server, peers)
    try:
        yield
    finally:
        server.should_exit = True
        await task
        peers.links[peers.number].deafen()


async def test_a_broadcast_asks_every_other_process_that_is_up(peers_of: Make) -> None:
    first, second, third, fourth = peers_of(4)
    fourth.board.put(fourth.number, UP, 0)
    async with serving(second), serving(third):
        headers = [(b"x", b"y"), (b"content-length", b"7"), (b"connection", b"close"), (b"transfer-encoding", b"z")]
        found = await first.broadcast("POST", "/admin/x?a=b", b"body", headers)
        told = [{**json.loads(body), "status": status} for status, body in found]
        same = {"internal": True, "method": "POST", "target": "/admin/x?a=b", "body": "body", "x": "y"}
        assert told == [{"number": number, "status": 200 + number, **same} for number in (1, 2)]
        long = "word " * 100_000
        ((_, body), _) = await first.broadcast("PUT", "/x", long.encode(), [])
        assert json.loads(body)["body"] == long


async def test_a_process_that_breaks_off_is_a_503(peers_of: Make) -> None:
    first, second = peers_of(2)
    second.links[1].listen(lambda arrival: arrival.socket.close())
    ((status, body),) = await first.broadcast("GET", "/x", b"", [])
    assert status == 503
    told = json.loads(body)
    assert told.pop("error").startswith("process 1 of the session server did not answer: ")
    assert told == {"type": "server_error", "code": 503}
    second.links[1].deafen()


def test_an_id_says_its_process_and_the_rest_is_chance(peers_of: Make) -> None:
    peers = peers_of(256)[171]
    ids = {peers.new_id() for _ in range(1000)}
    assert len({session_id[2:] for session_id in ids}) == 1000
    assert all(re.fullmatch("ab[0-9a-f]{30}", session_id) for session_id in ids)


@pytest.mark.parametrize(
    ("request_line", "number"),
    [
        (b"GET /sessions/02%s HTTP/1.1\r\n", 2),
        (b"POST /sessions/02%s/v1/chat/completions HTTP/1.1\r\n", 2),
        (b"GET /sessions/02%s?records=last HTTP/1.1\r\n", 2),
        (b"GET /sessions/01%s HTTP/1.1\r\n", 1),
        (b"GET /sessions/03%s HTTP/1.1\r\n", 1),  # not up: that it has no such session, anybody can say
        (b"GET /sessions/04%s HTTP/1.1\r\n", 1),  # there is none of that number
        (b"GET /sessions/02%s0 HTTP/1.1\r\n", 1),
        (b"GET /sessions/02%s", 1),
        (b"GET http://x/sessions/02%s HTTP/1.1\r\n", 1),
        (b"GET /health?/sessions/02%s HTTP/1.1\r\n", 1),
        (b"GET /sessions/2%s HTTP/1.1\r\n", 1),
        (b"\x16\x03\x01", 1),
    ],
)
def test_where_a_request_goes(peers_of: Make, request_line: bytes, number: int) -> None:
    peers = peers_of(4)[1]
    peers.board.put(3, UP, 0)
    line = request_line.replace(b"%s", b"a" * 30)
    assert peers.place(line) == (number, CLIENT)


@pytest.mark.parametrize("path", ["/health", "/sessions", "/sessions/-1%s", "/sessions/ 2%s", "/sessions/02%s0"])
def test_a_path_of_no_session_is_nobody_elses(peers_of: Make, path: str) -> None:
    peers = peers_of(4)[1]
    assert peers.owner_of(path.replace("%s", "a" * 30)) is None
    assert peers.owner_of(f"/sessions/02{'a' * 30}/v1/models") == 2


def test_sessions_are_created_in_each_process_in_turn(peers_of: Make) -> None:
    peers = peers_of(4)[1]
    peers.board.put(3, UP, 0)
    places = [peers.place(b"POST /sessions HTTP/1.1\r\n") for _ in range(6)]
    assert sorted(places) == [(number, FRESH) for number in (0, 0, 1, 1, 2, 2)]
    peers.board.put(1, UP, 0)
    peers.board.put(0, UP, 0)
    peers.board.put(2, UP, 0)
    assert peers.place(b"POST /sessions HTTP/1.1\r\n") == (1, FRESH)


def test_what_a_process_had_is_gone_with_it(peers_of: Make) -> None:
    first, second, third = peers_of(3)
    first.tell_sessions(5)
    second.tell_sessions(7)
    third.tell_sessions(11)
    second.tell_turns(3)
    assert (first.other_sessions(), second.other_sessions(), first.other_turns()) == (18, 16, 3)
    first.board.clear(1)
    assert (first.other_sessions(), second.board.get(1, SESSIONS), first.other_turns()) == (11, 0, 0)
