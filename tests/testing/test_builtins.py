"""Every built-in passes the conformance kit; what is built in is what pyproject.toml says."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from helpers.distributions import ROOT, distribution
from miles_core.plugins import KINDS, Registry
from miles_core.testing import conformance

ENTRY_POINTS: dict[str, dict[str, str]] = {
    group: entries
    for group, entries in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"].items()
    if group.startswith("miles.")
}
BUILTINS = [(kind.name, name) for kind in KINDS.values() for name in ENTRY_POINTS.get(kind.group, {})]


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    distribution(tmp_path, "miles-plugins", groups=ENTRY_POINTS)
    return Registry.discover(path=[str(tmp_path)], environ={})


@pytest.mark.parametrize(("kind", "name"), BUILTINS)
def test_a_built_in_keeps_its_contract(registry: Registry, kind: str, name: str) -> None:
    report = conformance.run(registry.load(kind, name))
    assert report.failures == ()
    assert any(check.outcome == "pass" for check in report.checks)


def test_every_entry_point_is_found_without_a_problem(registry: Registry) -> None:
    assert {record.state for record in registry.records} == {"found"}
    assert len(registry.records) == sum(map(len, ENTRY_POINTS.values()))
    assert registry.problems == ()


@pytest.mark.parametrize(("kind", "name"), BUILTINS)
def test_the_file_is_named_like_the_entry_point(registry: Registry, kind: str, name: str) -> None:
    assert registry.find(kind, name).target.partition(":")[0].rpartition(".")[2] == name
