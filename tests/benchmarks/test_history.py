"""What a history costs stays under the bars of `benchmarks/history.py` × 1.25, the best of three attempts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SLACK = 1.25
ATTEMPTS = 3


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "history.py"
    spec = importlib.util.spec_from_file_location("benchmarks_history", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("part", ["attaching", "memory", "assembling"])
def test_costs_stay_under_their_bars(benchmark: ModuleType, part: str) -> None:
    best: dict[str, tuple[float, float]] = {}
    for _ in range(ATTEMPTS):
        for figure in getattr(benchmark, part)():
            value = min(figure.value, best.get(figure.name, (figure.value, 0.0))[0])
            best[figure.name] = (value, figure.bar * SLACK)
        over = {name: figures for name, figures in best.items() if figures[0] > figures[1]}
        if not over:
            return
    raise AssertionError(f"over the bar in {ATTEMPTS} attempts: {over}")
