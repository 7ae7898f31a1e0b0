"""`/metrics`: what happened is what is counted, in a form that Prometheus reads."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from helpers.fake_engine import FakeEngine, Gate, Reply, refuses, says
from helpers.operator import ADMIN_KEY, Operator
from helpers.sessions import Answer, Serve, Talk, request, user
from miles_core.engine.route import Worker
from miles_core.server.metrics import Metrics, TurnCount, as_json, families, text
from miles_core.session.tree import TurnFacts

Server = Callable[..., str]


@pytest.fixture
def operator(serve: Serve) -> Operator:
    return Operator(serve(engine_health_seconds=0).url)


def test_a_conversation(operator: Operator, engine: FakeEngine) -> None:
    talk = Talk(operator.url)
    first, second = says("one"), says("two")
    engine.plays(first, second)
    talk.ask(user("a"))
    talk.ask(user("b"), stream=False)
    found = operator.metrics()
    assert found["miles_turns_total{outcome=committed}"] == 2
    assert sum(value for key, value in found.items() if key.startswith("miles_turns_total")) == 2
    assert found["miles_tokens_total{kind=prompt}"] == 20, "as the engine reports them"
    assert found["miles_tokens_total{kind=cached}"] == 6
    assert found["miles_tokens_total{kind=completion}"] == len(first.ids) + len(second.ids)
    assert found["miles_prefix_cache_share"] == pytest.approx(0.3)
    assert found["miles_sessions_open"] == found["miles_sessions_created_total"] == 1
    assert found["miles_turns_in_flight"] == 0
    for phase in ("prepare", "engine", "commit"):
        assert found[f"miles_turn_phase_seconds_count{{phase={phase}}}"] == 2
        assert 0 < found[f"miles_turn_phase_seconds_sum{{phase={phase}}}"] < 10
        assert found[f"miles_turn_phase_seconds_bucket{{le=+Inf,phase={phase}}}"] == 2
    assert found[f"miles_engine_healthy{{engine={engine.url}}}"] == 1
    assert found[f"miles_engine_sessions{{engine={engine.url}}}"] == 1
    assert found[f"miles_engine_errors_total{{engine={engine.url}}}"] == 0
    talk.delete()
    found = operator.metrics()
    assert (found["miles_sessions_open"], found["miles_sessions_created_total"]) == (0, 1)
    assert found[f"miles_engine_sessions{{engine={engine.url}}}"] == 0


OUTCOMES: dict[str, tuple[Callable[[Talk, FakeEngine], Answer | None], int | None]] = {
    "request_refused": (lambda talk, engine: talk.post([]), 400),
    "engine_refused": (lambda talk, engine: _with(talk, engine, refuses(429, b"{}")), 429),
    "engine_failed": (lambda talk, engine: _with(talk, engine, Reply(body=b"nonsense")), 502),
    "aborted": (lambda talk, engine: _with(talk, engine, says("half", finish="abort")), 200),
    "committed": (lambda talk, engine: _with(talk, engine, says("whole")), 200),
}


def _with(talk: Talk, engine: FakeEngine, reply: Reply, **fields: object) -> Answer:
    engine.plays(reply)
    return talk.post([user("u")], **fields)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("outcome", list(OUTCOMES))
def test_how_a_turn_ended(operator: Operator, engine: FakeEngine, outcome: str, stream: bool) -> None:
    talk = Talk(operator.url)
    if stream:
        plain = talk.post
        talk.post = lambda messages, **fields: plain(messages, stream=True, **fields)  # type: ignore[method-assign]
    act, status = OUTCOMES[outcome]
    answer = act(talk, engine)
    assert answer is not None
    assert answer.status == status
    assert operator.turns() == {outcome: 1}


def test_a_session_that_is_deleted_under_a_turn(operator: Operator, engine: FakeEngine) -> None:
    from concurrent.futures import ThreadPoolExecutor

    gate = Gate()
    engine.plays(says("late", gate=gate))
    talk = Talk(operator.url)
    with ThreadPoolExecutor() as pool:
        asking = pool.submit(talk.post, [user("u")])
        assert gate.entered.wait(20)
        assert operator.metrics()["miles_turns_in_flight"] == 1
        talk.delete()
        gate.open()
        assert asking.result(20).status == 200
    assert operator.turns() == {"not_committed": 1}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_hangs_up(operator: Operator, engine: FakeEngine, stream: bool) -> None:
    gate = Gate()
    engine.plays(says("late", gate=gate))
    talk = Talk(operator.url)
    with pytest.raises(TimeoutError):
        request(talk.chat_url, "POST", {"messages": [user("u")], "stream": stream}, timeout=0.5)
    engine.wait_for(lambda: bool(engine.aborted), 20)
    assert operator.turns() == {"client_left": 1}
    gate.open()


def test_a_turn_over_the_limit(serve: Serve, engine: FakeEngine) -> None:
    from concurrent.futures import ThreadPoolExecutor

    operator = Operator(serve(max_concurrent=1, engine_health_seconds=0).url)
    gate = Gate()
    engine.plays(says("held", gate=gate))
    talk = Talk(operator.url)
    with ThreadPoolExecutor() as pool:
        asking = pool.submit(talk.post, [user("u")])
        assert gate.entered.wait(20)
        assert Talk(operator.url).post([user("u")]).status == 429
        gate.open()
        assert asking.result(20).status == 200
    assert operator.turns() == {"committed": 1, "overloaded": 1}


@pytest.mark.parametrize(
    ("settings", "allowed", "refused"),
    [
        ({}, [None, "anything"], []),
        ({"admin_api_key": ADMIN_KEY}, [None, ADMIN_KEY], []),
        ({"api_key": "server"}, ["server"], [None, "other"]),
        ({"api_key": "server", "admin_api_key": ADMIN_KEY}, ["server", ADMIN_KEY], [None, "other"]),
    ],
)
def test_who_may_read_them(
    serve: Serve, settings: dict[str, str], allowed: list[str | None], refused: list[str | None]
) -> None:
    url = serve(engine_health_seconds=0, **settings).url

    def status(key: str | None) -> int:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return request(f"{url}/metrics", headers=headers).status

    assert [status(key) for key in allowed] == [200] * len(allowed)
    assert [status(key) for key in refused] == [401] * len(refused)


def test_only_reading(operator: Operator) -> None:
    assert request(f"{operator.url}/metrics", "POST", {}).status == 405
    head = request(f"{operator.url}/metrics", "HEAD")
    assert (head.status, head.body) == (200, b"")


def test_several_processes_and_odd_names_on_one_page() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    odd = Worker('http://me:secret@host/"quoted"\\back\nline')
    pages = {str(number): as_json(families(Metrics(), [odd], sessions=number, in_flight=0)) for number in range(3)}
    page = text(pages).decode()
    assert "secret" not in page
    found = {family.name: family for family in text_string_to_metric_families(page)}
    assert [(s.labels, s.value) for s in found["miles_sessions_open"].samples] == [
        ({"process": str(number)}, number) for number in range(3)
    ]
    assert {s.labels["engine"] for s in found["miles_engine_healthy"].samples} == {'http://host/"quoted"\\back\nline'}
    assert page.count("# TYPE miles_turns_total counter") == 1


def test_buckets_are_cumulative() -> None:
    metrics = Metrics()
    for seconds in (0.0, 0.0005, 0.0006, 3.0):
        metrics.phase("prepare", seconds)
    rows = {labels["le"]: value for name, labels, value in metrics.phases["prepare"].samples({}) if name == "_bucket"}
    assert (rows["0.0005"], rows["0.001"], rows["2.5"], rows["+Inf"]) == (2, 3, 3, 4)


def test_counting_costs_next_to_nothing() -> None:
    """A turn takes a millisecond; what is counted of it takes less than a hundredth of that."""
    metrics, turns = Metrics(), 2000
    facts = TurnFacts(
        finish_reason="stop", response_id=None, prompt_tokens=10, cached_tokens=3, weight_versions=("w",),
        version_ends=(5,), spec={}, request_timestamp=0.0, timestamp=0.0,
    )  # fmt: skip
    best = float("inf")
    for _ in range(5):
        started = time.thread_time()
        for _ in range(turns):
            for phase in ("prepare", "engine", "commit"):
                metrics.phase(phase, 0.003)
            TurnCount(metrics).committed(facts, 7)
        best = min(best, (time.thread_time() - started) / turns)
    assert best < 1e-5
