"""Several processes behind one port: a session is reached through any of them, as if there were one."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from helpers.fake_engine import FakeEngine, Gate, says
from helpers.sessions import Answer, Talk, request, user
from helpers.worker_processes import Running, connected, running

COUNT = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workers")


@pytest.fixture(scope="module")
def shared(folder: Path, checkpoint: Path, shared_engine: FakeEngine) -> dict[str, Any]:
    return {"checkpoint": str(checkpoint), "tito_model": "qwen3", "engine_urls": [shared_engine.url]}


@pytest.fixture(scope="module")
def running_server(folder: Path, shared: dict[str, Any]) -> Iterator[Running]:
    with running(folder, workers=COUNT, keepalive_seconds=0.05, max_body_mb=4, **shared) as server:
        yield server


@pytest.fixture
def server(running_server: Running, engine: FakeEngine) -> Running:
    return running_server


class Pipe:
    """One connection that is kept, for requests to whatever session."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._http = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)

    def ask(self, method: str, path: str, body: Any = None) -> Answer:
        """A request on it; http.client would open another where the server had closed it, which is refused here."""
        made = self._http.sock
        self._http.request(method, path, None if body is None else json.dumps(body).encode())
        response = self._http.getresponse()
        answer = Answer(response.status, [(k.lower(), v) for k, v in response.getheaders()], response.read())
        assert made is None or self._http.sock is made
        return answer

    def close(self) -> None:
        self._http.close()


def test_every_process_gets_sessions_and_says_which_server_it_is(server: Running) -> None:
    talks = [Talk(server.url) for _ in range(6 * COUNT)]
    assert {talk.id[:2] for talk in talks} == {"00", "01", "02"}
    assert all(len(talk.id) == 32 and int(talk.id, 16) >= 0 for talk in talks)
    assert len({request(f"{server.url}/health").body for _ in range(20)}) == 1


def test_every_endpoint_from_another_process(server: Running, engine: FakeEngine) -> None:
    """One kept connection: each request is for another process than the one before."""
    talks = server.talks(COUNT)
    pipe = Pipe(server.url)
    turn = {"model": "m", "messages": [user("hi")]}
    for talk in talks:
        answer = pipe.ask("POST", f"/sessions/{talk.id}/v1/chat/completions", turn)
        assert answer.message["content"] == "Fine."
    for talk in talks:
        answer = pipe.ask("POST", f"/sessions/{talk.id}/v1/chat/completions", {**turn, "stream": True})
        assert answer.header("content-type") == "text/event-stream"
        assert answer.body.endswith(b"data: [DONE]\n\n")
    for talk in talks:
        assert len(pipe.ask("GET", f"/sessions/{talk.id}").json["records"]) == 1
    for talk in talks:
        assert pipe.ask("POST", f"/sessions/{talk.id}/samples").header("content-type") == "application/octet-stream"
    for talk in talks:
        assert pipe.ask("GET", f"/sessions/{talk.id}/health").status == 200
        assert pipe.ask("POST", f"/sessions/{talk.id}/flush_cache").status == 403
    for talk in talks:
        assert pipe.ask("DELETE", f"/sessions/{talk.id}").status == 204
    for talk in talks:
        assert pipe.ask("DELETE", f"/sessions/{talk.id}").error == f"session not found: session_id={talk.id}"
    pipe.close()


@pytest.mark.parametrize("close", [False, True], ids=["kept", "closed"])
def test_the_openai_client_in_many_sessions(server: Running, engine: FakeEngine, close: bool) -> None:
    headers = {"Connection": "close"} if close else {}
    talks = [Talk(server.url) for _ in range(2 * COUNT)]
    with openai.OpenAI(base_url=server.url, api_key="none", default_headers=headers) as pool:
        for stream in (False, True, False):
            for talk in talks:
                client = pool.with_options(base_url=f"{talk.created['base_url']}/v1")
                talk.history.append(user(f"{stream}"))
                messages: Any = talk.history
                if stream:
                    events = list(client.chat.completions.create(model="m", messages=messages, stream=True))
                    talk.history.append({"role": "assistant", "content": "Fine.", "reasoning_content": "Well."})
                    assert "".join(event.choices[0].delta.content or "" for event in events if event.choices) == "Fine."
                else:
                    message = client.chat.completions.create(model="m", messages=messages).choices[0].message
                    talk.history.append(message.model_dump(exclude_none=True))
    for talk in talks:
        assert len(talk.records) == 3
        assert talk.created["base_url"] == f"{server.url}/sessions/{talk.id}"
        assert len(talk.samples().samples) == 1


@pytest.mark.slow
def test_a_long_body_moves_with_its_connection(server: Running, engine: FakeEngine) -> None:
    talks, pipe = server.talks(COUNT), Pipe(server.url)
    for talk in talks:
        text = "word " * 300_000 + talk.id
        body = {"model": "m", "messages": [user(text)]}
        assert pipe.ask("POST", f"/sessions/{talk.id}/v1/chat/completions", body).status == 200
        assert engine.turns[-1]["messages"][0]["content"] == text
    pipe.close()


@pytest.mark.parametrize("path", ["sessions", "%73essions"], ids=["moved", "asked for"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_hangs_up_aborts_its_request(
    server: Running, engine: FakeEngine, stream: bool, path: str
) -> None:
    for talk in server.talks(COUNT):
        gate = Gate()
        engine.plays(says(gate=gate))
        connection = connected(server.url)
        connection.sendall(raw("POST", f"/{path}/{talk.id}/v1/chat/completions", stream=stream))
        assert gate.entered.wait(60)
        if stream:
            seen = b""
            while b": keep-alive" not in seen:
                seen += connection.recv(1000)
        connection.close()
        rid = engine.turns[-1]["rid"]
        engine.wait_for(lambda rid=rid: rid in engine.aborted)  # type: ignore[misc]
        gate.open()
        assert talk.records == []


def test_more_connections_than_a_busy_process_has_room_for(server: Running, engine: FakeEngine) -> None:
    """They wait until it comes to them, and the others go on."""
    talks = server.talks(COUNT)
    held, count = talks[1], 400
    os.kill(server.pid_of(held), signal.SIGSTOP)
    try:
        waiting = [connected(server.url) for _ in range(count)]
        for connection in waiting:
            connection.sendall(f"GET /sessions/{held.id} HTTP/1.1\r\nHost: x\r\n{'X: ' + 'y' * 3000}\r\n\r\n".encode())
        talks[0].ask(user("meanwhile"))
        talks[2].ask(user("meanwhile"))
    finally:
        os.kill(server.pid_of(held), signal.SIGCONT)
    for connection in waiting:
        assert connection.recv(100).startswith(b"HTTP/1.1 200 OK")
        connection.close()


# -- as with one process -----------------------------------------------------------------------------------------------


def raw(method: str, target: str, *lines: str, body: bytes | None = None, stream: bool = False) -> bytes:
    """A request as it is sent; a turn unless a body is given."""
    body = json.dumps({"model": "m", "messages": [user("u")], "stream": stream}).encode() if body is None else body
    head = [f"{method} {target} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *lines]
    return "\r\n".join([*head, "", ""]).encode() + body


def exchange(url: str, *parts: bytes) -> bytes:
    """All that is answered to these bytes, sent one part after another, until the server or we have said all."""
    with connected(url) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            connection.sendall(part)
        answer = b""
        while more := connection.recv(65536):
            answer += more
        return answer


END = raw("GET", "/sessions", "Connection: close", body=b"")


def odd_requests(session: str, other: str) -> dict[str, list[bytes]]:
    """What a client may send too, by what is odd about it; each is the last on its connection, or END follows."""
    chat = f"/sessions/{session}/v1/chat/completions"
    whole = raw("POST", chat)
    post = f"POST {chat} HTTP/1.1\r\nHost: x\r\n"
    return {
        "pipelined": [raw("GET", f"/sessions/{session}", body=b"") + raw("GET", f"/sessions/{other}", body=b"") + END],
        "pipelined turns": [whole + raw("POST", f"/sessions/{other}/v1/chat/completions") + END],
        "byte by byte": [*(bytes([byte]) for byte in whole), END],
        "percent": [raw("GET", f"/%73essions/{session}", body=b""), END],
        "absolute target": [raw("POST", f"http://x{chat}"), END],
        "other absolute target": [raw("POST", f"http://elsewhere/{chat}"), END],
        "two slashes": [raw("POST", "/" + chat), END],
        "dots": [raw("GET", f"/sessions/{session}/../{other}", body=b""), END],
        "upper case": [raw("GET", f"/sessions/{session.upper()}", body=b""), END],
        "short id": [raw("GET", f"/sessions/{session[:31]}", body=b""), END],
        "long id": [raw("GET", f"/sessions/{session}0", body=b""), END],
        "unknown process": [raw("GET", f"/sessions/ff{session[2:]}", body=b""), END],
        "unknown session": [raw("GET", f"/sessions/{session[:2]}{'0' * 30}", body=b""), END],
        "no id": [raw("GET", "/sessions/", body=b""), END],
        "query": [raw("GET", f"/sessions/{session}?records=most", body=b""), END],
        "wrong method": [raw("PATCH", f"/sessions/{session}", body=b""), END],
        "HEAD": [raw("HEAD", f"/sessions/{session}/v1/models", body=b""), END],
        "not JSON": [raw("POST", chat, body=b"{"), END],
        "too large": [f"{post}Connection: close\r\nContent-Length: 9999999\r\n\r\n".encode()],
        "chunked": [f"{post}Transfer-Encoding: chunked\r\n\r\n3\r\n{{}}x\r\n0\r\n\r\n".encode(), END],
        "expect": [f"{post}Expect: 100-continue\r\nContent-Length: 2\r\n\r\n".encode(), b"{}", END],
        "HTTP/1.0": [f"GET /sessions/{session} HTTP/1.0\r\n\r\n".encode()],
        "blank lines first": [b"\r\n\r\n" + raw("GET", f"/sessions/{session}", body=b""), END],
        "bare line feeds": [f"GET /sessions/{session} HTTP/1.1\nHost: x\nConnection: close\n\n".encode()],
        "no HTTP": [f"GET /sessions/{session} no\r\n\r\n".encode()],
        "lower case method": [f"get /sessions/{session} HTTP/1.1\r\n\r\n".encode()],
        "TLS": [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(60)],
    }  # fmt: skip


def comparable(answer: bytes, *ids: str) -> list[bytes]:
    """An answer without dates and what else differs by chance."""
    for number, session in enumerate(ids):
        answer = answer.replace(session.encode(), b"<id %d>" % number).replace(session.upper().encode(), b"<ID>")
        answer = answer.replace(session[2:].encode(), b"<rest>").replace(session[:31].encode(), b"<short>")
        answer = answer.replace(b"session_id=" + session[:2].encode() + b"0", b"session_id=<process>0")
    return [line for line in answer.split(b"\r\n") if not line.lower().startswith(b"date:")]


@pytest.fixture(scope="module")
def alone(folder: Path, shared: dict[str, Any]) -> Iterator[Running]:
    with running(folder, workers=1, keepalive_seconds=0.05, max_body_mb=4, **shared) as server:
        yield server


@pytest.mark.parametrize("odd", odd_requests("0" * 32, "1" * 32))
def test_an_odd_request_is_answered_as_with_one_process(
    server: Running, alone: Running, engine: FakeEngine, odd: str
) -> None:
    always = says()
    engine.always = lambda body: always
    one, two = Talk(alone.url), Talk(alone.url)
    expected = comparable(exchange(alone.url, *odd_requests(one.id, two.id)[odd]), one.id, two.id)
    for number in range(COUNT):
        talks = server.talks(COUNT)
        first, second = talks[number], talks[number - 1]
        found = comparable(exchange(server.url, *odd_requests(first.id, second.id)[odd]), first.id, second.id)
        assert found == expected


# -- keys and limits ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_keys_open_what_they_open_with_one_process(folder: Path, shared: dict[str, Any], engine: FakeEngine) -> None:
    with running(folder, workers=COUNT, api_key="the key", **shared) as server:
        assert request(f"{server.url}/sessions", "POST").status == 401
        talks = server.talks(COUNT, key="the key")
        for talk, other in zip(talks, talks[1:] + talks[:1], strict=True):
            talk.ask(user("hi"))
            own = {"Authorization": f"Bearer {talk.created['api_key']}"}
            wrong = {"Authorization": f"Bearer {other.created['api_key']}"}
            turn = {"messages": [*talk.history, user("on")]}
            assert request(talk.chat_url, "POST", turn, headers=own).status == 200
            assert request(talk.chat_url, "POST", turn, headers=wrong).status == 401
            assert request(talk.chat_url, "POST", turn).status == 401
            assert request(f"{talk.url}/samples", "POST", headers=own).status == 403
            assert talk.delete().status == 204


@pytest.mark.slow
def test_limits_count_over_all_processes(folder: Path, shared: dict[str, Any], engine: FakeEngine) -> None:
    with running(folder, workers=COUNT, max_sessions=7, max_concurrent=2, **shared) as server:
        talks = [Talk(server.url) for _ in range(7)]
        assert len({talk.id[:2] for talk in talks}) == COUNT
        for _ in range(COUNT):
            refused = request(f"{server.url}/sessions", "POST")
            assert refused.status == 429
            assert refused.error == "7 sessions are open, the limit is 7 (--max-sessions)"
        gates = [Gate(), Gate()]
        engine.plays(*[says(gate=gate) for gate in gates])
        with ThreadPoolExecutor(2) as pool:
            turns = []
            for talk, gate in zip(talks, gates, strict=False):
                turns.append(pool.submit(talk.post, [user("long")]))
                assert gate.entered.wait(60)
            for talk in talks[2:]:
                refused = talk.post([user("one more")])
                assert refused.status == 429
                assert refused.error == "2 turns are in flight, the limit is 2 (--max-concurrent)"
            for gate in gates:
                gate.open()
            assert [turn.result(60).status for turn in turns] == [200, 200]
        talks[2].ask(user("now there is room"))
        talks[3].delete()
        Talk(server.url)
