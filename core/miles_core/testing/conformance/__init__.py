"""Checks that a plugin keeps its contract, the same from pytest and from `miles-plugins check`.

def test_my_agent_conforms():
    plugin = Registry.discover().load("agent", "my_agent")
    assert conformance.run(plugin).failures == ()
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from miles_core.plugins import Plugin
from miles_core.testing.conformance.report import Check, CheckFunction, Outcome, Report, Skip, run_checks

__all__ = ["Check", "CheckFunction", "Outcome", "Report", "Skip", "checks_of", "run"]

_MODULES = {
    "family": "miles_core.testing.conformance.family",
    "agent": "miles_core.testing.conformance.agent",
    "generator": "miles_core.testing.conformance.generator",
    "matcher": "miles_core.testing.conformance.matcher",
    "engine": "miles_core.testing.conformance.engine",
    "sample-hook": "miles_core.testing.conformance.sample_hook",
}


def checks_of(kind: str) -> Mapping[str, CheckFunction]:
    """The named checks of a kind, in the order in which they run."""
    checks: Mapping[str, CheckFunction] = import_module(_MODULES[kind]).CHECKS
    return checks


def run(plugin: Plugin) -> Report:
    """Run every check of the plugin's kind; a check that raises has failed, and the others still run."""
    return run_checks(plugin, checks_of(plugin.record.kind))
