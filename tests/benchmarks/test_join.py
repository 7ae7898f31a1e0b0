"""The benchmark of joins, as a gate: what a join costs does not grow with the history."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from helpers.distributions import ROOT
from helpers.golden import golden_names
from miles_core.tito import BoundFamily

FILE = Path(ROOT) / "benchmarks" / "join.py"


def loaded() -> Any:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("join_benchmark", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BENCHMARK = loaded()
ROOM = 1.25
"""What a machine that does other things too may add."""


def test_every_family_and_revision_is_measured() -> None:
    assert set(BENCHMARK.FAMILIES) == {*golden_names(), "default"}


@pytest.mark.parametrize("name", BENCHMARK.FAMILIES)
def test_a_join_costs_the_same_after_a_thousand_turns(name: str) -> None:
    family = BENCHMARK.family_of(name)
    attempts = (BENCHMARK.seconds_per_join(family) for _ in range(3))
    assert any(costs[-1] <= costs[0] * BENCHMARK.BAR * ROOM for costs in attempts)


def test_the_gate_notices_a_join_that_reads_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    family, join = BENCHMARK.family_of("qwen3"), BoundFamily.join
    monkeypatch.setattr(BENCHMARK, "REPEATS", 20)
    monkeypatch.setattr(BoundFamily, "join", lambda self, ids, suffix: join(self, list(ids), suffix))
    costs = BENCHMARK.seconds_per_join(family)
    assert costs[-1] > costs[0] * BENCHMARK.BAR * ROOM
