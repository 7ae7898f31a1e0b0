"""Every refusal has its status and shape, leaves the session byte for byte as it was, and a good turn follows."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import pytest

from helpers.fake_engine import FakeEngine, Gate, Reply, refuses, says
from helpers.sessions import WEATHER, Answer, Serve, Talk, assistant, request, user
from miles_core.server.app import ServerThread, url_of

GOOD = {"model": "m", "messages": [user("u")]}
HALF = b'{"model":"m","messages":[{"role":"user","content":"half \\ud83d end"}]}'
HALF_ARGUMENTS = (
    b'{"model":"m","messages":[{"role":"user","content":"u"},{"role":"assistant","content":null,'
    b'"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\\"a\\": \\"\\ud83d\\"}"}}]}]}'
)


def with_message(**message: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [user("u"), message]}).encode()


def with_fields(**fields: Any) -> bytes:
    return json.dumps({**GOOD, **fields}).encode()


REFUSED = {
    "empty body": (b"", "JSON"),
    "not json": (b"{", "JSON"),
    "list": (b"[]", "list"),
    "text": (b'"hello"', "str"),
    "null": (b"null", "NoneType"),
    "number": (b"1", "int"),
    "not utf-8": (b'{"messages": [{"role": "user", "content": "\xff"}]}', "Unicode"),
    "encoded surrogate": (b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}', "Unicode"),
    "lone surrogate": (HALF, "JSON"),
    "lone surrogate in arguments": (HALF_ARGUMENTS, "JSON"),
    "NaN": (b'{"messages": [{"role": "user", "content": "u"}], "temperature": NaN}', "JSON"),
    "no messages": (b'{"model": "m"}', "messages"),
    "messages null": (with_fields(messages=None), "messages"),
    "messages empty": (with_fields(messages=[]), "messages"),
    "messages text": (with_fields(messages="hi"), "messages"),
    "messages object": (with_fields(messages={"role": "user"}), "messages"),
    "message is text": (with_fields(messages=["hi"]), "messages[0]"),
    "message is null": (with_fields(messages=[user("u"), None]), "messages[1]"),
    "message without role": (with_message(content="x"), "messages[1]"),
    "role null": (with_message(role=None, content="x"), "messages[1]"),
    "role number": (with_message(role=3, content="x"), "messages[1]"),
    "role empty": (with_message(role="", content="x"), "messages[1]"),
    "role unknown": (with_message(role="developer", content="x"), "developer"),
    "content number": (with_message(role="user", content=5), "messages[1].content"),
    "content boolean": (with_message(role="user", content=True), "messages[1].content"),
    "content object": (with_message(role="user", content={"type": "text", "text": "x"}), "messages[1].content"),
    "part number": (with_message(role="user", content=[5]), "messages[1].content[0]"),
    "part type object": (with_message(role="user", content=[{"type": {}}]), "messages[1].content[0]"),
    "part without text": (with_message(role="user", content=[{"type": "text"}]), "messages[1].content[0]"),
    "part text number": (with_message(role="tool", content=[{"type": "text", "text": 1}]), "messages[1].content[0]"),
    "image": (with_message(role="user", content=[{"type": "image_url", "image_url": {"url": "x"}}]), "generate"),
    "audio": (with_message(role="user", content=[{"type": "input_audio", "input_audio": {}}]), "generate"),
    "video": (with_message(role="user", content=[{"type": "video_url", "video_url": {}}]), "generate"),
    "reasoning number": (with_message(role="assistant", content="", reasoning_content=1), "reasoning_content"),
    "calls object": (with_message(role="assistant", content="", tool_calls={"a": 1}), "tool_calls"),
    "calls text": (with_message(role="assistant", content="", tool_calls="x"), "tool_calls"),
    "calls number": (with_message(role="assistant", content="", tool_calls=1), "tool_calls"),
    "call number": (with_message(role="assistant", content="", tool_calls=[1]), "tool_calls[0]"),
    "call empty": (with_message(role="assistant", content="", tool_calls=[{}]), "tool_calls[0]"),
    "call function text": (with_message(role="assistant", content="", tool_calls=[{"function": "f"}]), "tool_calls[0]"),
    "call name number": (with_message(role="assistant", tool_calls=[{"function": {"name": 1}}]), "tool_calls[0]"),
    "n is 2": (with_fields(n=2), "n=2"),
    "n is 0": (with_fields(n=0), "n=0"),
    "n is true": (with_fields(n=True), "n=True"),
    "n is text": (with_fields(n="1"), "n='1'"),
    "kwargs list": (with_fields(chat_template_kwargs=[]), "chat_template_kwargs"),
    "kwargs text": (with_fields(chat_template_kwargs="x"), "chat_template_kwargs"),
    "kwargs in conflict": (with_fields(chat_template_kwargs={"clear_thinking": True}), "clear_thinking=True"),
    "continue_final_message": (with_fields(continue_final_message=True), "continue_final_message"),
    "stream_options number": (with_fields(stream=True, stream_options=1), "stream_options"),
    "stream text": (with_fields(stream="yes"), "stream"),
    "tools number": (with_fields(tools=5), "tools"),
    "tools object": (with_fields(tools={"a": 1}), "tools"),
    "tools text": (with_fields(tools="x"), "tools"),
    "tool number": (with_fields(tools=[1]), "tools[0]"),
    "tool null": (with_fields(tools=[WEATHER, None]), "tools[1]"),
}


def refused(talk: Talk, answer: Answer, status: int, text: str) -> None:
    assert answer.status == status, answer.body
    assert answer.header("content-type") == "application/json"
    assert text in answer.error


@pytest.mark.parametrize(("raw", "text"), REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("started", [False, True], ids=["new", "started"])
def test_the_clients_faults(talk: Talk, engine: FakeEngine, raw: bytes, text: str, started: bool) -> None:
    if started:
        talk.ask(user("first"), tools=[WEATHER])
        if b'"messages": [{' in raw:
            head = json.dumps(talk.history)[1:-1].encode()
            raw = raw.replace(b'"messages": [', b'"messages": [' + head + b", ")
            text = text.replace("messages[1]", "messages[3]")
    before, sent = talk.state(), len(engine.turns)
    refused(talk, talk.post_raw(raw), 400, text)
    assert talk.state() == before
    assert len(engine.turns) == sent
    talk.ask(user("good"))


@pytest.mark.parametrize("raw", [b"[]", b"1", b"{", b'{"metadata": 1}', b'{"chat_template_kwargs": []}', b"\xff"])
def test_a_session_is_not_created_from_a_wrong_body(url: str, raw: bytes) -> None:
    answer = request(f"{url}/sessions", "POST", raw=raw)
    assert answer.status == 400
    assert answer.error


@pytest.mark.parametrize("value", ["x", 1, 0, False, [], True])
def test_settings_of_a_session_are_objects(url: str, value: Any) -> None:
    for name in ("metadata", "chat_template_kwargs"):
        answer = request(f"{url}/sessions", "POST", {name: value})
        assert answer.status == 400
        assert name in answer.error


def test_a_session_in_conflict_with_the_family_is_refused(url: str) -> None:
    answer = request(f"{url}/sessions", "POST", {"chat_template_kwargs": {"clear_thinking": True}})
    assert answer.status == 400
    assert "clear_thinking=True" in answer.error
    assert "clear_thinking=False" in answer.error


def test_a_fixed_value_that_agrees_is_fine(talk: Talk) -> None:
    talk.ask(user("u"), chat_template_kwargs={"clear_thinking": False})


@pytest.mark.parametrize("path", ["flush_cache", "abort_request", "v1/completions", "generate", "v1", "x/../health"])
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_paths_off_the_list_are_forbidden(talk: Talk, engine: FakeEngine, path: str, method: str) -> None:
    before = talk.state()
    answer = request(f"{talk.url}/{path}", method, {})
    assert answer.status == 403
    assert path in answer.error
    assert not engine.requests
    assert talk.state() == before


@pytest.mark.parametrize("path", ["v1/chat/completions", "samples"])
def test_a_listed_path_with_another_method_is_told_which(talk: Talk, path: str) -> None:
    answer = request(f"{talk.url}/{path}", "GET")
    assert answer.status == 403
    assert answer.error.startswith(f"GET /{path} is not open to agents; below a session: POST v1/chat/completions, ")
    assert f"POST {path}," in answer.error


def test_a_client_without_a_session_is_told_where_its_requests_go(url: str) -> None:
    answer = request(f"{url}/v1/chat/completions", "POST", GOOD)
    assert answer.status == 404
    assert answer.error == (
        "POST /v1/chat/completions: Not Found; turns are taken below the base_url that POST /sessions gives"
    )


def test_an_unknown_session(url: str) -> None:
    for path, method in (("", "GET"), ("", "DELETE"), ("/samples", "POST"), ("/v1/chat/completions", "POST")):
        answer = request(f"{url}/sessions/nothere{path}", method, GOOD if method == "POST" else None)
        assert answer.status == 404
        assert answer.error == "session not found: session_id=nothere"
    assert request(f"{url}/sessions/nothere/v1/models").status == 404


def test_other_paths_and_methods(url: str, talk: Talk) -> None:
    assert request(f"{url}/nothing").status == 404
    assert request(f"{url}/nothing").error
    assert request(f"{url}/sessions").status == 405
    assert request(f"{url}/health", "POST").status == 405
    assert request(talk.url, "PUT").error


@pytest.mark.parametrize("which", ["first", "", "1", "ALL"])
def test_records_takes_three_values(talk: Talk, which: str) -> None:
    answer = request(f"{talk.url}?records={which}")
    assert answer.status == 400
    assert "all, last or none" in answer.error
    assert answer.json["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "raw",
    [
        b"[]",
        b"{",
        b'{"max_seq_len": 0}',
        b'{"max_seq_len": -1}',
        b'{"max_seq_len": "9"}',
        b'{"max_seq_len": true}',
        b'{"max_seq_len": 1.5}',
        b'{"metadata": []}',
        b'{"metadata": "x"}',
        b'{"metadata": 0}',
    ],
)
def test_a_wrong_samples_request(talk: Talk, raw: bytes) -> None:
    talk.ask(user("u"))
    before = talk.state()
    answer = request(f"{talk.url}/samples", "POST", raw=raw)
    assert answer.status == 400
    assert answer.error
    assert talk.state() == before


def test_a_body_over_the_limit(serve: Serve, engine: FakeEngine) -> None:
    talk = Talk(serve(max_body_mb=0.01).url)
    talk.ask(user("u"))
    before = talk.state()
    refused(talk, talk.post([*talk.history, user("x" * 20_000)]), 413, "0.01 MB")
    assert request(f"{talk.url}/samples", "POST", {"metadata": {"x": "y" * 20_000}}).status == 413
    assert talk.state() == before
    talk.ask(user("v"))


def test_over_the_session_limit(serve: Serve) -> None:
    url = serve(max_sessions=1).url
    talk = Talk(url)
    answer = request(f"{url}/sessions", "POST")
    refused(talk, answer, 429, "limit is 1")
    assert int(answer.header("retry-after") or "") > 0
    talk.delete()
    Talk(url).ask(user("u"))


def test_over_the_concurrency_limit(serve: Serve, engine: FakeEngine) -> None:
    url = serve(max_concurrent=1).url
    first, second = Talk(url), Talk(url)
    gate = Gate()
    engine.plays(says(gate=gate))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(first.ask, user("u"))
        assert gate.entered.wait(10)
        before = second.state()
        answer = second.post([user("u")])
        refused(second, answer, 429, "limit is 1")
        assert int(answer.header("retry-after") or "") > 0
        assert second.state() == before
        gate.open()
        assert running.result(10).status == 200
    second.ask(user("u"))


def test_shutting_down(session_server: ServerThread, talk: Talk) -> None:
    talk.ask(user("u"))
    before = talk.state()
    session_server.service.closing = True
    try:
        for answer in (talk.post([user("u")]), request(f"{session_server.url}/sessions", "POST")):
            refused(talk, answer, 503, "shutting down")
            assert int(answer.header("retry-after") or "") > 0
    finally:
        session_server.service.closing = False
    assert talk.state() == before
    talk.ask(user("v"))


@pytest.mark.parametrize(("matcher", "text"), [("raises", "no opinion"), ("answers_one", "expected True or False")])
def test_a_matcher_that_breaks_its_contract_is_named(serve: Serve, engine: FakeEngine, matcher: str, text: str) -> None:
    talk = Talk(serve(message_matcher=f"helpers.faulty_matchers.{matcher}").url)
    talk.ask(user("u"))
    before = talk.state()
    answer = talk.post([*talk.history, user("v")])
    refused(talk, answer, 500, text)
    assert "message_matches" in answer.error
    assert f"helpers.faulty_matchers.{matcher}" in answer.error
    assert talk.state() == before


# -- the engine's faults: 502, and its own answers -----------------------------------------------------------


def lacking(*path: Any) -> Reply:
    """A good reply without one thing."""

    def change(reply: Any) -> None:
        for key in path[:-1]:
            reply = reply[key]
        del reply[path[-1]]

    return says().with_json(change)


def changed(value: Any, *path: Any) -> Reply:
    """A good reply with one thing replaced."""

    def change(reply: Any) -> None:
        for key in path[:-1]:
            reply = reply[key]
        reply[path[-1]] = value

    return says().with_json(change)


META = ("choices", 0, "meta_info")
LOGPROBS = (*META, "output_token_logprobs")


def broken_replies() -> dict[str, tuple[Reply, str]]:
    return {
        "not json": (Reply(body=b"<html>"), "invalid JSON"),
        "empty": (Reply(body=b""), "invalid JSON"),
        "list": (Reply(body=b"[]"), "choices[0]"),
        "no choices": (lacking("choices"), "choices[0]"),
        "choices empty": (changed([], "choices"), "choices[0]"),
        "choice null": (changed([None], "choices"), "choices[0]"),
        "no message": (lacking("choices", 0, "message"), "message"),
        "content null": (changed(None, "choices", 0, "message", "content"), "message"),
        "content list": (changed([], "choices", 0, "message", "content"), "message"),
        "calls object": (changed({"a": 1}, "choices", 0, "message", "tool_calls"), "tool_calls"),
        "call list": (changed([[None]], "choices", 0, "message", "tool_calls"), "tool_calls"),
        "no meta_info": (lacking(*META), "router"),
        "meta_info null": (changed(None, *META), "router"),
        "no log-probs": (lacking(*LOGPROBS), "output_token_logprobs"),
        "log-probs null": (changed(None, *LOGPROBS), "output_token_logprobs"),
        "too few log-probs": (changed([[-1.0, 5, None]], *LOGPROBS), "sent 1 output_token_logprobs"),
        "no completion_tokens": (lacking(*META, "completion_tokens"), "completion_tokens=None"),
        "count differs": (changed(1, *META, "completion_tokens"), "completion_tokens=1"),
        "log-prob null": (changed([None, 5, None], *LOGPROBS, 0), "log-probability None"),
        "log-prob text": (changed(["x", 5, None], *LOGPROBS, 0), "log-probability 'x'"),
        "log-prob true": (changed([True, 5, None], *LOGPROBS, 0), "log-probability True"),
        "log-prob NaN": (Reply(body=says().body.replace(b"[[-", b"[[NaN, 5, null], [-", 1)), "JSON"),
        "log-prob -inf": (Reply(body=says().body.replace(b"[[-", b"[[-Infinity, 5, null], [-", 1)), "JSON"),
        "entry short": (changed([-1.0], *LOGPROBS, 0), "log-probability None"),
        "entry number": (changed(1, *LOGPROBS, 0), "log-probability None"),
        "id null": (changed([-1.0, None, None], *LOGPROBS, 0), "token id None"),
        "id negative": (changed([-1.0, -1, None], *LOGPROBS, 0), "token id -1"),
        "id too large": (changed([-1.0, 151_936, None], *LOGPROBS, 0), "token id 151936"),
        "id huge": (changed([-1.0, 2**40, None], *LOGPROBS, 0), "outside the vocabulary"),
        "id float": (changed([-1.0, 1.5, None], *LOGPROBS, 0), "token id 1.5"),
    }


@pytest.mark.parametrize("name", list(broken_replies()))
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_200_answer_that_lacks_something(talk: Talk, engine: FakeEngine, name: str, stream: bool) -> None:
    talk.ask(user("first"))
    before = talk.state()
    reply, text = broken_replies()[name]
    engine.plays(reply)
    answer = talk.post([*talk.history, user("u")], stream=stream)
    refused(talk, answer, 502, text)
    assert answer.json["type"] == "engine_error"
    assert talk.state() == before
    assert talk.samples().samples
    talk.ask(user("again"))


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (refuses(400, '{"message": "longer than the model\'s context length é"}'.encode()), "application/json"),
        (refuses(401, b"<h1>no</h1>", kind="text/html"), "text/html"),
        (refuses(503, b"<html>down</html>", kind="text/html"), "text/html"),
        (refuses(429, b'{"error": "busy"}', ("Retry-After", "7")), "application/json"),
        (refuses(500, b""), "application/json"),
        (refuses(302, b"", ("Location", "/elsewhere"), kind="text/plain"), "text/plain"),
        (refuses(201, b"{}"), "application/json"),
    ],
    ids=lambda value: str(value.status) if isinstance(value, Reply) else "",
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_engines_own_refusals_pass_through(
    talk: Talk, engine: FakeEngine, reply: Reply, kind: str, stream: bool
) -> None:
    talk.ask(user("first"))
    before = talk.state()
    engine.plays(reply)
    answer = talk.post([*talk.history, user("u" * 50)], stream=stream)
    assert (answer.status, answer.body) == (reply.status, reply.body)
    assert (answer.header("content-type") or "").split(";")[0] == kind
    assert answer.header("retry-after") == dict(reply.headers).get("Retry-After")
    assert talk.state() == before
    assert len(talk.samples().samples) == 1
    talk.ask(user("shorter"))


def test_an_engine_that_is_not_there(serve: Serve, engine: FakeEngine) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        dead = url_of(taken)
        talk = Talk(serve(engine_urls=(dead,)).url)
        before = talk.state()
        for stream in (False, True):
            refused(talk, talk.post([user("u")], stream=stream), 502, dead)
        assert request(f"{talk.url}/v1/models").status == 502
        assert talk.state() == before


def test_history_that_diverges_is_400_with_the_counts(talk: Talk) -> None:
    talk.ask(user("one"))
    talk.ask(user("two"))
    before = talk.state()
    refused(talk, talk.post([assistant("none of this")]), 400, "discard_count=2")
    assert talk.state() == before
    talk.ask(user("three"))


def test_the_concurrency_limit_holds_for_requests_at_once(serve: Serve, engine: FakeEngine) -> None:
    url = serve(max_concurrent=2).url
    talks = [Talk(url) for _ in range(12)]
    gate = Gate()
    engine.always = lambda body: says(gate=gate)
    with ThreadPoolExecutor(12) as pool:
        turns = [pool.submit(talk.post, [user("u")]) for talk in talks]
        refusals = 0
        for turn in as_completed(turns, timeout=20):
            refusals += turn.result().status == 429
            if refusals == 10:
                gate.open()
        assert sorted(turn.result().status for turn in turns) == [200] * 2 + [429] * 10
    assert len(engine.turns) == 2
