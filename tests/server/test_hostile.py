"""Requests no agent should send: each is refused or served, never a 500, and the session lives on."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest

from helpers.fake_engine import FakeEngine, says
from helpers.sessions import WEATHER, Talk, assistant, request, tool, user


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def body(messages: Any, **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": messages, **fields}).encode()


def calling(arguments: Any, **keys: Any) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}, **keys}
    return [user("u"), assistant(None, tool_calls=[call]), tool("t")]


BODIES = {
    "deep braces": b'{"messages":' + b"[" * 100_000,
    "deep messages": f'{{"messages": {"[" * 5000 + "]" * 5000}}}'.encode(),
    "deep unknown field": body([user("u")], extra=deep(120)),
    "deep tool": body([user("u")], tools=[{"type": "function", "function": {"name": "f", "parameters": deep(300)}}]),
    "very deep unknown field": f'{{"messages": [{{"role": "user", "content": "u"}}], "x": {nested(900)}}}'.encode(),
    "very deep tool": f'{{"messages": [{{"role": "user", "content": "u"}}], "tools": [{nested(900)}]}}'.encode(),
    "very deep arguments": f'{{"messages": [{{"role": "assistant", "tool_calls": [{{"function": {{"name": "f", '
    f'"arguments": {nested(900)}}}}}]}}]}}'.encode(),
    "very deep kwargs": body([user("u")], chat_template_kwargs=0).replace(b": 0}", f": {nested(900)}}}".encode()),
    "deep arguments text": body(calling(nested(5000))),
    "huge number": b'{"messages": [{"role": "user", "content": "u"}], "seed": ' + b"9" * 400 + b"}",
    "huge number in arguments": body(calling('{"a": ' + "9" * 5000 + "}")),
    "huge exponent": b'{"messages": [{"role": "user", "content": "u"}], "x": 1e999}',
    "exponent in arguments": body(calling('{"a": 1e999}')),
    "huge integer in tools": b'{"messages": [{"role": "user", "content": "u"}], "tools": [{"type": "function", '
    b'"function": {"name": "f", "x": 123456789012345678901234567890}}]}',
    "zero byte": body([user("a\0b")]),
    "duplicate keys": b'{"messages": [], "messages": [{"role": "user", "content": "u"}]}',
    "many keys": body([user("u")], **{f"k{n}": n for n in range(3000)}),
    "arguments list": body(calling(["x"])),
    "arguments number": body(calling(42)),
    "arguments true": body(calling(True)),
    "arguments empty": body(calling("")),
    "arguments broken": body(calling("{bad")),
    "arguments scalar": body(calling('"Beijing"')),
    "arguments surrogate": body(calling('{"a": "\\ud83d"}')),
    "arguments NaN": body(calling('{"a": NaN}')),
    "call id number": body(calling("{}", id=1, type=[])),
    "calls null": body([assistant("x", tool_calls=None), user("u")]),
    "name of a tool null": body([user("u")], tools=[{"type": "function", "function": {"name": None}}]),
    "function of a tool number": body([user("u")], tools=[{"type": "function", "function": 1}]),
    "function of a tool list": body([user("u")], tools=[{"function": []}]),
    "bare tool": body([user("u")], tools=[{"name": "f", "parameters": {}}]),
    "empty tool": body([user("u")], tools=[{}]),
    "tool_choice": body([user("u")], tools=[WEATHER], tool_choice={"x": [1]}),
    "kwargs of every name": body(
        [user("u")],
        chat_template_kwargs={"messages": 1, "tools": 2, "add_generation_prompt": 0, "raise_exception": 1, "loop": 1},
    ),
    "kwargs self": body([user("u")], chat_template_kwargs={"self": 1, "documents": [], "range": 3, "namespace": 1}),
    "kwargs with odd names": body([user("u")], chat_template_kwargs={"": 1, "a b": 2, "é": 3, "__class__": 4}),
    "enable_thinking list": body([user("u")], chat_template_kwargs={"enable_thinking": [1]}),
    "reasoning_effort object": body([user("u")], reasoning_effort={"a": 1}),
    "reasoning_effort list": body([user("u")], reasoning_effort=["none"]),
    "keys of messages": body([{"role": "user", "content": "u", "items": 1, "keys": 2, "": 3}]),
    "key names of mappings": body(calling({"items": 1, "keys": 2, "get": 3})),
    "message named": body([{"role": "user", "content": "u", "name": {"a": 1}}]),
    "logprob_start_len": body([user("u")], logprob_start_len="x"),
    "input_ids text": body([user("u")], input_ids="x", rid=[1]),
    "model null": body([user("u")], model=None),
    "n null": body([user("u")], n=None, stream=None, stream_options=None),
    "n one point zero": body([user("u")], n=1.0),
    "parts of text": body([user(["a", "b"])]),
    "parts empty": body([user([])]),
    "tool alone": body([tool("x")]),
    "assistant alone": body([assistant("x")]),
    "system alone": body([{"role": "system", "content": None}]),
    "close tag in text": body([assistant("a</think>b<think>c</think>"), user("</think>")]),
    "braces in text": body([user("{{ 7 * 7 }}{% for %}"), {"role": "system", "content": "{{ messages }}"}]),
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("started", [False, True], ids=["new", "started"])
def test_an_odd_request(talk: Talk, engine: FakeEngine, name: str, started: bool) -> None:
    if started:
        talk.ask(user("first"))
    before, sent = talk.state(), len(engine.turns)
    answer = talk.post_raw(BODIES[name])
    assert answer.status in (200, 400), answer.body
    assert b"Traceback" not in answer.body
    if answer.status == 400:
        assert len(answer.error) < 1000
        assert talk.state() == before
        assert len(engine.turns) == sent
    assert request(f"{talk.url}/samples", "POST").status == 200
    talk.state()
    answer = talk.post([*talk.history, user("good")])
    assert answer.status == 200, answer.body


SERVED = [
    "zero byte",
    "duplicate keys",
    "many keys",
    "arguments list",
    "arguments empty",
    "arguments broken",
    "arguments surrogate",
    "exponent in arguments",
    "deep arguments text",
    "bare tool",
    "n null",
    "parts of text",
    "parts empty",
    "keys of messages",
    "key names of mappings",
    "deep unknown field",
    "model null",
    "braces in text",
]


@pytest.mark.parametrize("name", SERVED)
def test_odd_but_valid_requests_are_served(talk: Talk, name: str) -> None:
    answer = talk.post_raw(BODIES[name])
    assert answer.status == 200, answer.body
    assert talk.metadata["tito_session_mismatch"] == []


@pytest.mark.parametrize("arguments", ['"Beijing"', '["Beijing"]', "42", "{bad", "", '{"a": "\\ud83d"}', "null"])
def test_odd_arguments_the_model_wrote_do_not_block_the_next_turn(
    talk: Talk, engine: FakeEngine, arguments: str
) -> None:
    engine.plays(says("", calls=[("f", arguments)]))
    talk.ask(user("u"), tools=[WEATHER])
    talk.ask(tool("x"), tools=[WEATHER])
    assert len(talk.records) == 2
    assert isinstance(talk.metadata["tito_session_mismatch"], list)


def test_an_answer_nested_too_deep_is_the_engines_fault(talk: Talk, engine: FakeEngine) -> None:
    def nest(reply: Any) -> None:
        reply["choices"][0]["message"]["extra"] = deep(400)

    before = talk.state()
    engine.plays(says().with_json(nest))
    answer = talk.post([user("u")])
    assert answer.status == 502
    assert "levels deep" in answer.error
    assert talk.state() == before


def test_metadata_nested_too_deep(url: str) -> None:
    answer = request(f"{url}/sessions", "POST", {"metadata": {"a": deep(400)}})
    assert answer.status == 400
    assert "levels deep" in answer.error


def test_the_model_may_write_replacement_characters(talk: Talk, engine: FakeEngine) -> None:
    engine.plays(says("half \ufffd end", calls=[("f", '{"a": "\ufffd"}')]))
    talk.ask(user("u"))
    talk.ask(tool("ok \ufffd"))
    assert len(talk.samples().samples) == 1


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "PUT", "PATCH", "TRACE", "DELETE", "FOO"])
@pytest.mark.parametrize("path", ["", "/samples", "/v1/chat/completions", "/v1/models", "/nope"])
def test_odd_methods(talk: Talk, method: str, path: str) -> None:
    if (method, path) == ("DELETE", ""):
        return
    talk.ask(user("u"))
    before = talk.state()
    answer = request(talk.url + path, method)
    assert answer.status in (200, 400, 403, 405), (answer.status, answer.body)
    if method == "HEAD":
        assert answer.body == b""
    assert talk.state() == before


@pytest.mark.parametrize(
    "target",
    [
        "/sessions/%F0%9F%8C%8A",
        "/sessions/%ff%fe",
        "/sessions/%00",
        "/sessions/..%2f..%2fetc",
        "/sessions/%2e%2e/health",
        "/sessions//v1/models",
        "/sessions/{id}//v1/models",
        "/sessions/{id}/%76%31/models",
        "/sessions/{id}/v1/models/../../flush_cache",
        "/sessions/{id}/v1/models%2f..%2f..%2fflush_cache",
        "/sessions/{id}/v1%2fmodels",
        "/sessions/{id}/tokenize%3Fx=1",
        "/sessions/{id}/flush_cache%23",
        "/sessions/{id}/%ff",
        "/sessions/{id}/",
        "/sessions/{id}/v1/models?x=%ff&y=é".replace("é", "%C3%A9"),
        "/sessions/{id}?records=%ff",
        "/sessions/{id}?records=all&records=none",
        "/%ff",
        "//",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_odd_paths(talk: Talk, engine: FakeEngine, target: str, method: str) -> None:
    server = talk.url.rsplit("/sessions/", 1)[0]
    before = talk.state()
    path = target.replace("{id}", talk.id)
    answer = raw_request(server, method, path)
    assert answer in range(200, 500), answer
    assert {r.path for r in engine.requests} <= {"/v1/models", "/tokenize"}
    assert talk.state() == before


def raw_request(server: str, method: str, target: str, extra: bytes = b"") -> int:
    """The status of a request whose target is sent as it is."""
    parts = urlsplit(server)
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=10) as connection:
        head = f"{method} {target} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
        connection.sendall(head.encode() + extra + (b"" if extra else b"Content-Length: 0\r\n") + b"\r\n")
        got = b""
        while b"\r\n" not in got:
            more = connection.recv(65536)
            assert more, got
            got += more
    return int(got.split()[1])


@pytest.mark.parametrize(
    "extra",
    [
        b"Content-Length: 3\r\n\r\n{x}",
        b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n",
        b"Content-Length: x\r\n",
        b"Content-Length: -1\r\n",
        b"Authorization: \xff\xfe\r\nContent-Length: 0\r\n",
        b"X-Odd: \x80abc\r\nContent-Length: 0\r\n",
        b"Content-Type: text/plain\r\nContent-Length: 0\r\n",
        b"Content-Encoding: gzip\r\nContent-Length: 0\r\n",
        b"Host: other\r\nContent-Length: 0\r\n",
    ],
)
def test_odd_headers(talk: Talk, url: str, extra: bytes) -> None:
    path = talk.chat_url.removeprefix(url)
    before = talk.state()
    assert raw_request(url, "POST", path, extra) == 400
    assert talk.state() == before


def test_odd_headers_travel_or_not_but_do_no_harm(talk: Talk, engine: FakeEngine) -> None:
    headers = {"X-Odd": "caf\xe9", "X-Empty": "", "Range": "bytes=0-1", "If-None-Match": "*"}
    sent = request(talk.chat_url, "POST", {"messages": [user("u")]}, headers=headers)
    assert sent.status == 200
    assert len(talk.records) == 1


def test_a_large_body_within_the_limit(talk: Talk, engine: FakeEngine) -> None:
    talk.ask(user("word " * 100_000))
    talk.ask(user("short"))
    assert len(talk.records) == 2


def test_metadata_of_any_kind(url: str) -> None:
    talk = Talk(url, metadata={"a": deep(120), "é": None, "session_id": 1, "accumulated_token_ids": "mine"})
    talk.ask(user("u"))
    assert talk.metadata["accumulated_token_ids"] != "mine"
    assert talk.samples().session_metadata["é"] is None
