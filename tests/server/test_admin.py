"""The admin API: who may use it, engines that come and go, and weight updates to all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from helpers.fake_engine import FakeEngine, Reply, fake_engine, says
from helpers.operator import ADMIN_KEY, Operator
from helpers.sessions import Serve, Talk, request, user
from miles_core.errors import ConfigError
from miles_core.server.admin import CALLS
from miles_core.server.app import ServerThread
from miles_core.server.settings import ServerSettings


@pytest.fixture
def other() -> Iterator[FakeEngine]:
    """A second engine."""
    with fake_engine() as engine:
        yield engine


@pytest.fixture
def server(serve: Serve, engine: FakeEngine, other: FakeEngine) -> ServerThread:
    urls = (engine.url, other.url)
    return serve(engine_urls=urls, admin_api_key=ADMIN_KEY, api_key="server-key", engine_health_seconds=0)


@pytest.fixture
def operator(server: ServerThread) -> Operator:
    return Operator(server.url)


def calls(engine: FakeEngine) -> list[tuple[str, Any]]:
    return [(recorded.path, recorded.body) for recorded in engine.requests]


# -- keys ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["engines", "pause_generation", "nonsense", ""])
def test_without_a_key_configured_it_is_off_and_says_how_to_turn_it_on(
    serve: Serve, engine: FakeEngine, path: str
) -> None:
    url = serve().url
    for headers in ({}, {"Authorization": "Bearer x"}):
        answer = request(f"{url}/admin/{path}", "POST", {"mode": "retract"}, headers=headers)
        assert answer.status == 403
        assert "--admin-api-key KEY or MILES_ADMIN_API_KEY" in answer.error
    assert engine.requests == []


def test_no_other_key_opens_it(server: ServerThread, engine: FakeEngine, other: FakeEngine) -> None:
    session_key = Talk(server.url, key="server-key").created["api_key"]
    for key in (None, "server-key", session_key, "Admin-key", "admin-key2", "\xe9"):
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        for method, path in (("GET", "engines"), ("POST", "pause_generation"), ("DELETE", f"engines?url={engine.url}")):
            answer = request(f"{server.url}/admin/{path}", method, headers=headers)
            assert answer.status == 401
            assert "keys of agents and sessions do not open it" in answer.error
    assert engine.requests == other.requests == []


def test_the_admin_key_opens_nothing_else(server: ServerThread) -> None:
    answer = request(f"{server.url}/sessions", "POST", headers={"Authorization": f"Bearer {ADMIN_KEY}"})
    assert answer.status == 401


def test_agents_do_not_reach_it_through_their_session(server: ServerThread, engine: FakeEngine) -> None:
    talk = Talk(server.url, key="server-key")
    for path in ("admin/engines", "pause_generation", "update_weights_from_disk", "../../admin/engines"):
        assert request(f"{talk.url}/{path}", "POST", {}, headers=talk.headers).status in (401, 403, 404)
    assert engine.requests == []


def test_processes_of_a_server_talk_where_clients_do_not(operator: Operator) -> None:
    assert operator.ask("GET", "state").status == 404
    assert operator.ask("POST", "state", {"engines": [], "paused": None}).status == 404
    assert len(operator.engines()) == 2


@pytest.mark.parametrize("key", ["", "server-key"])
def test_the_key_is_one_of_its_own(key: str) -> None:
    with pytest.raises(ConfigError, match="--admin-api-key must be a key of its own"):
        ServerSettings(
            checkpoint="c", tito_model="qwen3", engine_urls=("http://e",), api_key="server-key", admin_api_key=key
        )


# -- engines ---------------------------------------------------------------------------------------------------


def test_what_is_shown(operator: Operator, engine: FakeEngine, other: FakeEngine, server: ServerThread) -> None:
    Talk(server.url, key="server-key").ask(user("one"))
    shown = operator.engines()
    assert list(shown) == [engine.url, other.url]
    row = next(row for row in shown.values() if row["sessions"])
    assert {key: row[key] for key in ("state", "sessions", "in_flight", "errors", "last_error", "router")} == {
        "state": "healthy", "sessions": 1, "in_flight": 0, "errors": 0, "last_error": None, "router": None,
    }  # fmt: skip


def test_an_engine_that_does_not_serve_yet_is_added_and_waits(serve: Serve, engine: FakeEngine) -> None:
    operator = Operator(serve(admin_api_key=ADMIN_KEY, engine_health_seconds=0.05).url)
    with fake_engine() as late:
        late.stop()
        assert operator.add(late.url + "/")["state"] == "unhealthy"
        assert late.url in operator.engines()
        late.start()
        operator.until(late.url, state="healthy")
        assert operator.ask("DELETE", f"engines?url={late.url}").status == 200


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "text"),
    [
        ("POST", "engines", {}, 400, "url must be an engine's base URL, such as http://10.0.0.7:30000 (found None)"),
        ("POST", "engines", {"url": "10.0.0.7:30000"}, 400, "found '10.0.0.7:30000'"),
        ("POST", "engines", {"url": "ftp://x"}, 400, "base URL"),
        ("POST", "engines", {"url": "http://x/?a=1"}, 400, "base URL"),
        ("POST", "engines", {"url": 7}, 400, "found 7"),
        ("POST", "engines", {"url": "http://x:99999"}, 400, "found 'http://x:99999'"),
        ("POST", "engines", {"url": "http://x:port"}, 400, "found 'http://x:port'"),
        ("POST", "engines", {"url": "http://:30000"}, 400, "found 'http://:30000'"),
        ("POST", "engines", {"url": "http://[::1"}, 400, "found 'http://[::1'"),
        ("POST", "engines", {"url": "http://a b"}, 400, "found 'http://a b'"),
        ("POST", "engines", {"url": "http://x\r\nX: 1"}, 400, "base URL"),
        (
            "POST",
            "engines",
            {"url": "http://x", "draining": "yes"},
            400,
            "draining must be true or false (found 'yes')",
        ),
        ("DELETE", "engines?url=http://nobody", None, 404, "http://nobody is not one of the engines: http://"),
        ("DELETE", "engines", None, 400, "base URL"),
        ("PUT", "engines?url=http://x", None, 405, "expected GET, POST or DELETE"),
        ("OPTIONS", "engines", None, 405, "expected GET, POST or DELETE"),
        ("POST", "shutdown", {}, 404, "/admin/shutdown: expected engines, "),
        ("GET", "flush_cache", None, 405, "expected POST"),
        ("POST", "flush_cache?engine=http://nobody", {}, 404, "engine=http://nobody is not one of the engines"),
    ],
)
def test_what_is_asked_wrongly(operator: Operator, method: str, path: str, body: Any, status: int, text: str) -> None:
    answer = operator.ask(method, path, body)
    assert (answer.status, text in answer.error) == (status, True), answer.error
    assert len(operator.engines()) == 2


def test_a_body_that_is_no_json_object(operator: Operator, engine: FakeEngine) -> None:
    for path in ("engines", "flush_cache"):
        assert operator.ask("POST", path, raw=b"[1]").status == 400
        assert operator.ask("POST", path, raw=b"{").status == 400
    assert engine.requests == []


def test_the_last_engine_stays(operator: Operator, engine: FakeEngine, other: FakeEngine) -> None:
    assert operator.ask("DELETE", "engines", {"url": other.url}).status == 200
    refused = operator.ask("DELETE", "engines", {"url": engine.url})
    assert (refused.status, refused.error) == (409, f"{engine.url} is the only engine: add another one first")


# -- weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_call_goes_to_every_engine(operator: Operator, engine: FakeEngine, other: FakeEngine, name: str) -> None:
    body = {"mode": "retract"} if name == "pause_generation" else {"model_path": "/new", "weight_version": "v2"}
    answer = operator.ask("POST", name, body)
    assert answer.status == 200
    assert [(row["engine"], row["ok"], row["status"]) for row in answer.json["engines"]] == [
        (engine.url, True, 200),
        (other.url, True, 200),
    ]
    assert answer.json["engines"][0]["answer"]["path"] == f"/{name}"
    assert calls(engine) == calls(other) == [(f"/{name}", body)]
    assert "admin-key" not in str(engine.requests[0].header_lines)


def test_a_call_to_one_engine(operator: Operator, engine: FakeEngine, other: FakeEngine) -> None:
    body = {"rank_offset": 4}
    assert operator.ask("POST", f"init_weights_update_group?engine={other.url}", body).status == 200
    assert calls(other) == [("/init_weights_update_group", body)]
    assert engine.requests == []


def test_a_call_that_one_engine_misses_says_which(operator: Operator, engine: FakeEngine, other: FakeEngine) -> None:
    other.stop()
    answer = operator.ask("POST", "update_weights_from_disk", {"model_path": "/new"})
    other.start()
    assert answer.status == 502
    assert f"update_weights_from_disk failed on 1 of 2 engines ({other.url}: " in answer.error
    assert "the others did it. Repeat it for one with ?engine=URL" in answer.error
    assert [(row["engine"], row["ok"]) for row in answer.json["engines"]] == [(engine.url, True), (other.url, False)]
    assert operator.ask("POST", f"update_weights_from_disk?engine={other.url}", {"model_path": "/new"}).status == 200


def test_a_call_that_every_engine_misses_says_so(operator: Operator, other: FakeEngine) -> None:
    other.stop()
    answer = operator.ask("POST", f"flush_cache?engine={other.url}", {})
    other.start()
    assert answer.status == 502
    assert answer.error.startswith(f"flush_cache failed on 1 of 1 engines ({other.url}: 'the engine at ")
    assert answer.error.endswith("); none did it")


@pytest.mark.parametrize(
    "body",
    [
        ("pause_generation", {"mode": "abort"}),
        ("pause_generation", {}),
        ("pause_generation", {"mode": None}),
        ("update_weights_from_disk", {"model_path": "/new", "abort_all_requests": True}),
        ("update_weight_version", {"new_version": "v2", "abort_all_requests": True}),
    ],
)
def test_what_would_abort_turns_is_refused(operator: Operator, engine: FakeEngine, body: tuple[str, Any]) -> None:
    refused = operator.ask("POST", *body)
    assert refused.status == 400
    assert "nothing of them is kept" in refused.error
    assert '"retract" or "in_place"' in refused.error
    assert engine.requests == []


def test_an_update_in_place_must_not_flush(operator: Operator, engine: FakeEngine) -> None:
    update = ("update_weights_from_disk", {"model_path": "/new"})
    assert operator.ask("POST", "pause_generation", {"mode": "in_place"}).status == 200
    for flush in ({}, {"flush_cache": True}):
        refused = operator.ask("POST", update[0], {**update[1], **flush})
        assert refused.status == 400
        assert 'send "flush_cache": false' in refused.error
    assert operator.ask("POST", update[0], {**update[1], "flush_cache": False}).status == 200
    assert operator.ask("POST", "continue_generation", {}).status == 200
    assert operator.ask("POST", *update).status == 200
    assert operator.ask("POST", "pause_generation", {"mode": "retract"}).status == 200
    assert operator.ask("POST", *update).status == 200


def test_weight_versions_of_turns_and_tokens(server: ServerThread, engine: FakeEngine, other: FakeEngine) -> None:
    """An update inside a generation: both versions in their order, and which tokens are whose."""
    talk = Talk(server.url, key="server-key")
    first, second = says("one two three"), says("four")
    count, last = len(first.ids), len(second.ids)
    spans = [{"version": "v1", "start": 0, "end": 4}, {"version": "v2", "start": 4, "end": count}]
    for one in (engine, other):
        one.plays(
            says("one two three", meta={"weight_version": "v2", "weight_versions": spans}),
            says(
                "four", meta={"weight_version": "v2", "weight_versions": [{"version": "v2", "start": 0, "end": last}]}
            ),
            says("five", meta={"weight_version": "v3", "weight_versions": [{"version": "v2"}, {"version": "v3"}]}),
        )
    for text in ("a", "b", "c"):
        talk.ask(user(text))
    (sample,) = talk.samples().samples
    assert sample["weight_versions"] == ["v1", "v2", "v2", "v2", "v3"]
    rows = sample["metadata"]["weight_spans"]
    assert [(row["turn"], row["version"]) for row in rows] == [(0, "v1"), (0, "v2"), (1, "v2"), (2, None)]
    start = len(sample["tokens"]) - sample["response_length"]
    assert [rows[0]["start"] - start, rows[0]["end"] - start, rows[1]["end"] - start] == [0, 4, count]
    covered = [at for row in rows for at in range(row["start"], row["end"])]
    trained = [start + at for at, value in enumerate(sample["loss_mask"]) if value]
    assert covered == trained, "every token that is trained has its weights, and no other"
    cut = talk.samples(max_seq_len=rows[1]["end"] - 2).samples[0]["metadata"]["weight_spans"]
    assert [(row["version"], row["end"]) for row in cut] == [("v1", rows[0]["end"]), ("v2", rows[1]["end"] - 2)]


def test_an_engine_that_says_no(operator: Operator, engine: FakeEngine, other: FakeEngine) -> None:
    """SGLang answers some failures with 200 and success=false."""
    said = b'{"success": false, "message": "Failed to get weights iterator", "num_paused_requests": 0}'
    engine.answers["/update_weights_from_disk"] = lambda body: Reply(body=said)
    answer = operator.ask("POST", "update_weights_from_disk", {"model_path": "/new"})
    assert answer.status == 502
    assert "Failed to get weights iterator" in answer.error
