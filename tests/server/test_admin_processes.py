"""The operator's side of a server of several processes: one answers for all, and all follow."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.fake_engine import FakeEngine, fake_engine
from helpers.operator import ADMIN_KEY, Operator
from helpers.sessions import Talk, user
from helpers.worker_processes import Running, running, until

COUNT = 2


@pytest.fixture
def other() -> Iterator[FakeEngine]:
    with fake_engine() as engine:
        yield engine


@pytest.fixture
def server(tmp_path: Path, checkpoint: Path, engine: FakeEngine) -> Iterator[Running]:
    given: dict[str, Any] = {"checkpoint": str(checkpoint), "tito_model": "qwen3", "engine_urls": [engine.url]}
    with running(tmp_path, workers=COUNT, admin_api_key=ADMIN_KEY, **given) as found:
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
