"""Checks that a plugin keeps its contract, the same from pytest and from `miles-plugins check NAME`.

def test_my_agent_conforms():
    conforms("agent", "my_agent")

Most checks look at the plugin. Agents, generate functions and engines are also tried out, on a task of the kit's or on
one that is given: `conforms("agent", "my_agent", trial=AgentTrial(prompt=…, answers=…))`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, Protocol, cast

from miles_core.plugins import Plugin, Registry
from miles_core.plugins.importing import said
from miles_core.testing.conformance.report import Check, CheckAnswer, CheckFunction, Outcome, Report, Skip, run_checks

__all__ = ["Check", "CheckFunction", "Outcome", "Report", "Skip", "checks_of", "conforms", "names_of", "run"]

_HERE = "miles_core.testing.conformance"
_MODULES: Mapping[str, tuple[str, ...]] = {
    "family": (f"{_HERE}.family", f"{_HERE}.family_limits"),
    "agent": (f"{_HERE}.agent",),
    "generator": (f"{_HERE}.generator",),
    "matcher": (f"{_HERE}.matcher",),
    "engine": (f"{_HERE}.engine",),
    "sample-hook": (f"{_HERE}.sample_hook",),
}
_TRIALS: Mapping[str, str] = {kind: f"miles_core.testing.trials.{kind}" for kind in ("agent", "generator", "engine")}


class _Trials(Protocol):
    """A module that tries plugins out: what the trial looks like, and what is looked at afterwards."""

    CHECKS: Mapping[str, Callable[[Any], CheckAnswer]]
    OPTIONAL: frozenset[str]

    def play(self, plugin: Plugin, trial: Any) -> Any:
        """Run the plugin on the trial (None is the kit's own) and tell what happened."""
        ...


def checks_of(kind: str) -> Mapping[str, CheckFunction]:
    """The named checks of a kind that look at a plugin, in the order in which they run."""
    return {name: check for module in map(import_module, _MODULES[kind]) for name, check in module.CHECKS.items()}


def names_of(kind: str) -> Mapping[str, bool]:
    """Every check of a kind, those that take a run too, in their order; whether it is required."""
    modules = [import_module(name) for name in (*_MODULES[kind], *([_TRIALS[kind]] if kind in _TRIALS else []))]
    return {name: name not in _optional(module) for module in modules for name in module.CHECKS}


def _optional(module: object) -> frozenset[str]:
    found: frozenset[str] = getattr(module, "OPTIONAL", frozenset())
    return found


def conforms(kind: str, name: str, *, trial: object = None, waive: Mapping[str, str] | None = None) -> Report:
    """Load an installed plugin and run its checks; the report.

    `trial` is a task for it (`AgentTrial`, `GeneratorTrial`, `EngineTrial`). `waive` are names of checks that may fail,
    each with the reason in words. Raises AssertionError with the whole report if another one fails, and what
    `Registry.load` raises.
    """
    report = run(Registry.discover().load(kind, name), trial=trial).waived(waive or {})
    if report.failures:
        raise AssertionError(f"{len(report.failures)} of {len(report.checks)} checks failed\n{report.text()}")
    return report


def run(plugin: Plugin, *, trial: object = None, try_out: bool = True) -> Report:
    """Run every check of the plugin's kind; a check that raises has failed, and the others still run.

    Without `try_out`, the plugin is looked at, but not run on a task.
    """
    kind = plugin.record.kind
    looks = {name: partial(check, plugin) for name, check in checks_of(kind).items()}
    optional = {name for name, required in names_of(kind).items() if not required}
    checks = run_checks(plugin, looks, optional)
    if try_out and kind in _TRIALS and not any(check.outcome is Outcome.FAIL for check in checks):
        checks += _tried_out(plugin, cast("_Trials", import_module(_TRIALS[kind])), trial)
    return Report(plugin.describe(), checks)


def _tried_out(plugin: Plugin, module: _Trials, trial: object) -> tuple[Check, ...]:
    """The checks that take a run; a plugin whose shape is wrong already gets none."""
    try:
        played = module.play(plugin, trial)
    except (Exception, SystemExit) as error:
        return (Check("can be tried out", Outcome.FAIL, said(error, plugin.module.__name__)),)
    return run_checks(plugin, {name: partial(c, played) for name, c in module.CHECKS.items()}, module.OPTIONAL)
