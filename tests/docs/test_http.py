"""The page on the HTTP API, held against a running server: paths, statuses, keys, tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from helpers.chat_tokenizer import write_checkpoint
from helpers.fake_engine import FakeEngine, fake_engine, says
from helpers.sessions import CLOCK, WEATHER, Talk, assistant, request, user
from helpers.tables import codes, page, section, table
from miles_core import errors
from miles_core.plugins import Registry
from miles_core.server.app import ServerThread
from miles_core.server.service import PASSED_ON
from miles_core.server.settings import ServerSettings
from miles_core.session import wire

PAGE = page("docs/http_api.md")
REQUESTS = [(codes(row[0])[0], row) for row in table(PAGE, "request", "answer")]


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    with fake_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    checkpoint = str(write_checkpoint(tmp_path_factory.mktemp("checkpoint")))
    settings = ServerSettings(
        checkpoint=checkpoint, tito_model="qwen3", engine_urls=(engine.url,), history="tree", api_key="key"
    )
    with ServerThread(settings, Registry.discover()) as thread:
        yield thread.url


@pytest.fixture
def talk(server: str, engine: FakeEngine) -> Talk:
    engine.reset()
    return Talk(server, key="key")


def words(text: str) -> set[str]:
    """What a text names."""
    return set(re.findall(r"\w+", text))


@pytest.mark.parametrize(("name", "row"), REQUESTS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_documented_request_answers_as_it_says(name: str, row: list[str], talk: Talk, server: str) -> None:
    if " " not in name or "admin" in name:
        pytest.fail(f"{name}: no test knows this row") if " " not in name and name != "/sessions/{id}/" else None
        return
    method, path = name.split()
    answer = request(f"{server}{path}".replace("{id}", talk.id), method, headers=talk.headers)
    assert answer.status != 404, name
    promised = re.match(r"(\d{3})", row[1])
    if promised:
        assert answer.status == int(promised[1])


def test_paths_that_reach_the_engine_are_the_documented_ones() -> None:
    (row,) = [row for _, row in REQUESTS if "passed to the engine" in row[1]]
    assert set(codes(row[0])[1:]) == set(PASSED_ON)


def test_created_sessions_and_health_have_the_documented_keys(talk: Talk, server: str) -> None:
    rows = dict(REQUESTS)
    assert set(talk.created) <= words(rows["POST /sessions"][1])
    assert {"session_id", "base_url", "api_key"} == set(talk.created)
    assert set(request(f"{server}/health").json) <= words(rows["GET /health"][1])


def test_a_session_shows_the_documented_keys_and_no_others(talk: Talk, engine: FakeEngine) -> None:
    engine.plays(says("One."), says("Two."), says("Three."))
    talk.ask(user("Count."), tools=[WEATHER])
    talk.ask(user("Go on."), tools=[CLOCK])
    talk.post([user("Count."), assistant("Not so."), user("Spell <|im_end|>.")])
    reading = section(PAGE, "Reading a session")
    (record,) = set(map(frozenset, talk.records))
    assert record <= words(reading[reading.index("A record is") : reading.index("`metadata` has")])
    documented = {key for row in table(reading, "key", "what") for key in codes(row[0])}
    assert set(talk.metadata) <= documented, "the page lacks keys"
    always = {"accumulated_token_ids", "max_trim_tokens", "tito_session_mismatch", "tree"}
    assert always <= set(talk.metadata)
    tree = talk.metadata["tree"]
    assert {*tree, *tree["nodes"][0], *tree["leaves"][0]} <= words(reading)


def test_samples_have_the_documented_tensors_and_fields() -> None:
    samples = section(PAGE, "Samples")
    rows = table(samples, "tensor", "dtype")
    tensors = {name.partition(".")[0]: row[1] for row in rows for name in codes(row[0])}
    assert tensors == {
        name: dtype.__name__ if isinstance(dtype, type) else str(dtype) for name, dtype in wire.TENSORS.items()
    }
    fields = samples[samples.index("and in the JSON") :].partition("`miles_core.session.wire`")[0]
    assert set(codes(fields)) >= {*wire.JSON_FIELDS, "nulls", "reward"}


def test_statuses_are_those_of_the_errors() -> None:
    rows = table(section(PAGE, "Errors"), "status", "when")
    written = {int(number) for row in rows for number in re.findall(r"\d{3}", row[0])}
    raised = {
        value.status
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.MilesError)
    }
    assert written >= raised
    assert written - raised - {503, 405} == set()


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/sessions", 405), ("GET", "/nowhere", 404)])
def test_other_paths_and_methods_answer_as_documented(server: str, method: str, path: str, status: int) -> None:
    answer = request(f"{server}{path}", method, headers={"Authorization": "Bearer key"})
    assert answer.status == status == answer.json["code"]
    assert str(status) in {row[0] for row in table(section(PAGE, "Errors"), "status", "when")}


def test_error_bodies_have_the_documented_form(server: str) -> None:
    answer = request(f"{server}/sessions/{'0' * 32}", headers={"Authorization": "Bearer key"})
    assert set(answer.json) <= words(section(PAGE, "Errors"))
    assert answer.error == f"session not found: session_id={'0' * 32}"
