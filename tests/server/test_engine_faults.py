"""Engines that die, break off, move and come back."""

from __future__ import annotations

import pytest

from helpers.fake_engine import FakeEngine, Reply, fake_engine, says
from helpers.sessions import Serve, Talk, request, user


def test_an_engine_that_dies_and_comes_back(serve: Serve) -> None:
    with fake_engine() as engine:
        talk = Talk(serve(engine_urls=(engine.url,)).url)
        talk.ask(user("one"))
        before = talk.state()
        engine.stop()
        answer = talk.post([*talk.history, user("two")])
        assert answer.status == 502
        assert engine.url in answer.error
        assert talk.state() == before
        assert request(f"{talk.url}/v1/models").status == 502
        engine.start()
        talk.ask(user("two"))
        assert len(talk.records) == 2
        assert request(f"{talk.url}/v1/models").status == 200


@pytest.mark.parametrize("cut", [0, 100])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_connection_cut_in_the_middle(talk: Talk, engine: FakeEngine, cut: int, stream: bool) -> None:
    talk.ask(user("one"))
    before = talk.state()
    engine.always = lambda body: Reply(body=says().body, cut=cut)
    answer = talk.post([*talk.history, user("two")], stream=stream)
    assert answer.status == 502
    assert answer.header("content-type") == "application/json"
    assert engine.url in answer.error
    assert talk.state() == before
    engine.reset()
    talk.ask(user("two"))


def test_a_connection_cut_once_is_tried_again_under_another_id(talk: Talk, engine: FakeEngine) -> None:
    engine.plays(Reply(body=says().body, cut=10), says("second"))
    assert talk.ask(user("u")).message["content"] == "second"
    first, second = engine.turns
    assert first["rid"] != second["rid"]
    assert first["input_ids"] == second["input_ids"]
    assert talk.records[0]["request"]["rid"] == second["rid"]
    engine.wait_for(lambda: engine.aborted == [first["rid"]])


def test_a_session_moves_when_its_worker_fails(serve: Serve, engine: FakeEngine) -> None:
    with fake_engine() as other:
        url = serve(engine_urls=(engine.url, other.url)).url
        talks = [Talk(url) for _ in range(4)]
        for talk in talks:
            talk.ask(user("one"))
        assert (len(engine.turns), len(other.turns)) == (2, 2), "sessions are spread by load"
        for talk in talks:
            talk.ask(user("two"))
        assert (len(engine.turns), len(other.turns)) == (4, 4), "and stay where they are"
        other.stop()
        for talk in talks:
            talk.ask(user("three"))
            assert len(talk.records) == 3
        assert len(engine.turns) == 8
        other.start()
        for talk in talks:
            talk.ask(user("four"))


@pytest.mark.parametrize("first", [0, 1])
def test_what_is_passed_on_moves_too(serve: Serve, engine: FakeEngine, first: int, unused_tcp_port: int) -> None:
    """Whichever worker is dead, a session that has had no turn yet is not held up by it."""
    urls = [engine.url]
    urls.insert(first, f"http://127.0.0.1:{unused_tcp_port}")
    url = serve(engine_urls=tuple(urls), engine_health_seconds=0).url
    for talk in [Talk(url) for _ in range(4)]:
        assert request(f"{talk.url}/health").status == 200
        assert request(f"{talk.url}/v1/models").status == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_abort_goes_to_the_client_and_is_repeated(talk: Talk, engine: FakeEngine, stream: bool) -> None:
    talk.ask(user("one"))
    records = talk.records
    engine.plays(says("half", finish="abort"), says("whole"))
    aborted = talk.post([*talk.history, user("two")], stream=stream)
    assert aborted.status == 200
    assert b'"finish_reason":"abort"' in aborted.body.replace(b'": "', b'":"')
    assert talk.records == records
    assert talk.metadata["aborted"] is True
    assert [s["status"] for s in talk.samples().samples] == ["aborted"]
    talk.ask(user("two"))
    assert engine.turns[1]["input_ids"] == engine.turns[2]["input_ids"]
    assert "aborted" not in talk.metadata
    assert [s["status"] for s in talk.samples().samples] == ["completed"]


def test_an_abort_while_queued_has_next_to_nothing(talk: Talk, engine: FakeEngine) -> None:
    def bare(reply: object) -> None:
        assert isinstance(reply, dict)
        reply["choices"][0]["message"] = {"role": "assistant", "content": None}
        reply["choices"][0]["meta_info"] = {"finish_reason": {"type": "abort", "message": "Abort"}}

    engine.plays(says(finish="abort").with_json(bare))
    assert talk.post([user("one")]).status == 200
    assert talk.records == []
    assert talk.metadata["aborted"] is True
    assert talk.samples().empty_reason == "no_records"
    talk.ask(user("one"))
    assert "aborted" not in talk.metadata


def test_the_engines_key_is_sent_and_not_the_agents(serve: Serve, engine: FakeEngine) -> None:
    server = serve(engine_api_key="engine-key", api_key="server-key")
    talk = Talk(server.url, key="server-key")
    talk.ask(user("u"))
    assert engine.requests[-1].headers["Authorization"] == "Bearer engine-key"
