"""The operator's side of a server of several processes: one answers for all, and all follow."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from helpers.fake_engine import FakeEngine, Gate, Reply, fake_engine
from helpers.operator import ADMIN_KEY, Operator
from helpers.sessions import Talk, user
from helpers.streams import added_up, streamed
from helpers.worker_processes import Running, running, until

COUNT = 2


@pytest.fixture
def other() -> Iterator[FakeEngine]:
    with fake_engine() as engine:
        yield engine


NEVER_AGAIN = "import miles_core.engine.facts as facts; facts.AGAIN_AFTER = 3600.0"
"""What an engine said of itself is believed for an hour."""


@pytest.fixture
def server(tmp_path: Path, checkpoint: Path, engine: FakeEngine) -> Iterator[Running]:
    given: dict[str, Any] = {"checkpoint": str(checkpoint), "tito_model": "qwen3", "engine_urls": [engine.url]}
    with running(tmp_path, code=NEVER_AGAIN, workers=COUNT, admin_api_key=ADMIN_KEY, **given) as found:
        yield found


@pytest.mark.slow
def test_engines_weights_and_metrics_of_all_processes(server: Running, engine: FakeEngine, other: FakeEngine) -> None:
    operator = Operator(server.url)
    talks = server.talks(COUNT)
    for talk in talks:
        talk.ask(user("one"))
    before = operator.metrics()
    assert before["miles_turns_total{outcome=committed}"] == COUNT
    assert before[f"miles_engine_sessions{{engine={engine.url}}}"] == COUNT
    assert operator.engines()[engine.url]["sessions"] == COUNT

    operator.add(other.url)
    operator.add(engine.url, draining=True)
    for talk in talks:
        talk.ask(user("two"))
    assert (len(engine.turns), len(other.turns)) == (COUNT, COUNT), "each process knows of both changes"
    assert operator.engines()[other.url]["sessions"] == COUNT

    paused = [operator.ask("POST", "pause_generation", {"mode": "in_place"}).status]
    assert paused == [200]
    assert [recorded.path for recorded in other.requests].count("/pause_generation") == 1, "once, not once a process"
    for _ in range(2 * COUNT):  # whoever is asked knows of the pause
        refused = operator.ask("POST", "update_weights_from_disk", {"model_path": "/new"})
        assert refused.status == 400
    assert operator.ask("POST", "continue_generation", {}).status == 200
    assert operator.ask("DELETE", f"engines?url={engine.url}").status == 200

    os.kill(server.pid_of(talks[1]), signal.SIGKILL)
    fresh: list[Talk] = []

    def back() -> bool:
        fresh.append(Talk(server.url))
        return fresh[-1].id[:2] == talks[1].id[:2]

    until(back, "a new process in the place of the killed one")
    fresh[-1].ask(user("one"))
    assert len(engine.turns) == COUNT, "it was told that the first engine is gone"
    for _ in range(2 * COUNT):
        assert list(operator.engines()) == [other.url]


@pytest.mark.slow
@pytest.mark.parametrize("call", ["update_weights_from_disk", "update_weight_version"])
def test_live_turns_of_every_process_have_the_weights_of_an_update(
    server: Running, engine: FakeEngine, call: str
) -> None:
    engine.streams = True
    operator, talks = Operator(server.url), server.talks(COUNT)

    def updates(body: Any) -> Reply:
        engine.weight_version = body["weight_version"]
        return Reply(body=b'{"success": true}')

    def turn(talk: Talk) -> None:
        asked = [*talk.history, user("next")]
        stream = streamed(talk, asked)
        assert stream.form == "live"
        talk.history = [*asked, added_up(stream.chunks)]

    engine.answers[f"/{call}"] = updates
    for version in ("w1", "w2", "w3"):
        assert operator.ask("POST", call, {"weight_version": version}).status == 200
        for talk in talks:
            turn(talk)
    assert [talk.samples().samples[0]["weight_versions"] for talk in talks] == [["w1", "w2", "w3"]] * COUNT


@pytest.mark.slow
def test_engines_that_are_added_at_once_are_all_kept(server: Running, engine: FakeEngine, other: FakeEngine) -> None:
    """One that is looked at for long, while another process is told of more."""
    operator, gate = Operator(server.url), Gate()
    other.answers["/health"] = lambda body: Reply(body=b"", gate=gate)
    quick = [f"http://127.0.0.1:{port}" for port in range(1, 9)]
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(operator.add, other.url)
        assert gate.entered.wait(30)
        for url in quick:
            operator.add(url)
        gate.open()
        slow.result()
    for url in quick[::2]:
        assert operator.ask("DELETE", f"engines?url={url}").status == 200
    for _ in range(4 * COUNT):
        assert set(operator.engines()) == {engine.url, other.url, *quick[1::2]}
