"""A session says when an agent's replay threw turns away."""

from __future__ import annotations

from helpers.fake_engine import FakeEngine, says
from helpers.sessions import Talk, user


def test_dropped_reasoning_is_named(talk: Talk, engine: FakeEngine) -> None:
    engine.plays(says("One.", reasoning="Because."), says("Two."))
    talk.ask(user("u"))
    changed = {key: value for key, value in talk.history[1].items() if key != "reasoning_content"}
    assert talk.post([talk.history[0], changed, user("v")]).status == 200
    metadata = talk.metadata
    assert metadata["rolled_back"] == 1
    assert metadata["diverged"] == {"message": 1, "role": "assistant", "keys": ["reasoning_content"]}
    assert talk.samples().session_metadata["diverged"] == metadata["diverged"]


def test_a_plain_retry_diverges_nowhere(talk: Talk, engine: FakeEngine) -> None:
    engine.plays(says("One."), says("Two."))
    talk.post([user("u")])
    talk.post([user("u")])
    assert talk.metadata["rolled_back"] == 1
    assert "diverged" not in talk.metadata


def test_an_exact_replay_says_nothing(talk: Talk, engine: FakeEngine) -> None:
    engine.plays(says("One."), says("Two."))
    talk.ask(user("u"))
    talk.ask(user("v"))
    assert {"rolled_back", "diverged"}.isdisjoint(talk.metadata)
