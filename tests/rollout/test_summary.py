"""Totals of a run."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from miles_core.rollout.summary import Tally, count_turns, summarize, summary_table


def record(**fields: Any) -> dict[str, Any]:
    return {
        "leaf_index": 0,
        "tokens": [0] * 10,
        "response_length": 6,
        "loss_mask": [1, 1, 0, 0, 1, 0],
        "status": "completed",
        "weight_versions": ["a", "b"],
        "reward": 1.0,
        "metadata": {},
        **fields,
    }


def test_totals() -> None:
    tally = Tally()
    tally.add(record(reward=0.0), resumed=True)
    tally.add(record(status="truncated", metadata={"tito_session_mismatch": [{"type": "assistant_text"}] * 2}))
    tally.add(record(leaf_index=1, reward=None, metadata={"agent_error": "x", "tito_session_mismatch": []}))
    tally.failures = 2
    summary = summarize(tally, wall_time=2.0)
    assert summary["schema"] == 1
    assert (summary["samples"], summary["rollouts"], summary["resumed_samples"], summary["failures"]) == (3, 2, 1, 2)
    assert summary["reward"] == {"count": 2, "mean": 0.5, "min": 0.0, "max": 1.0}
    assert summary["turns"]["mean"] == 2
    assert (summary["tokens"], summary["trained_tokens"], summary["share_trained"]) == (30, 9, 0.3)
    assert summary["statuses"] == {"completed": 2, "truncated": 1}
    assert (summary["mismatches"], summary["samples_with_mismatch"]) == ({"assistant_text": 2}, 1)
    assert (summary["samples_per_s"], summary["tokens_per_s"]) == (1.0, 10.0)
    assert summary["agent_errors"] == 1


@pytest.mark.parametrize(
    ("fields", "turns"),
    [({}, 2), ({"weight_versions": []}, 2), ({"weight_versions": [], "metadata": {"lifecycle": [{}]}}, 1)],
)
def test_turns(fields: dict[str, Any], turns: int) -> None:
    assert count_turns(record(**fields)) == turns


def test_the_table_of_an_empty_run() -> None:
    console = Console(width=100, file=io.StringIO())
    with console.capture() as shown:
        console.print(summary_table(summarize(Tally(), wall_time=0.0)))
    assert "reward        none" in shown.get()
