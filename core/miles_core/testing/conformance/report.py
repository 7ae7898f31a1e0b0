"""What a check is, and the report of a plugin's checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from miles_core.errors import MilesError
from miles_core.plugins import Plugin
from miles_core.plugins.importing import said


class Outcome(StrEnum):
    """How a check ended; the values are what `check` prints."""

    PASS = "pass"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True)
class Skip:
    """A check's answer when it does not apply, or cannot be made here."""

    reason: str


CheckFunction: TypeAlias = Callable[[Plugin], str | Skip | None]
"""Gives None if all is well, the reason as text if not, or Skip."""


@dataclass(frozen=True)
class Check:
    """One named check of one plugin, and the reason unless it passed."""

    name: str
    outcome: Outcome
    reason: str | None = None


@dataclass(frozen=True)
class Report:
    """All checks of one plugin."""

    plugin: str
    checks: tuple[Check, ...]

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.outcome is Outcome.FAIL)


def run_checks(plugin: Plugin, checks: Mapping[str, CheckFunction]) -> Report:
    """Run `checks` one after the other; what one raises is its failure, Ctrl-C excepted."""
    return Report(plugin.describe(), tuple(_run(plugin, name, check) for name, check in checks.items()))


def _run(plugin: Plugin, name: str, check: CheckFunction) -> Check:
    try:
        answer = check(plugin)
    except MilesError as error:
        return Check(name, Outcome.FAIL, error.message)
    except (Exception, SystemExit) as error:
        return Check(name, Outcome.FAIL, said(error, plugin.module.__name__))
    if isinstance(answer, Skip):
        return Check(name, Outcome.SKIP, answer.reason)
    return Check(name, Outcome.PASS if answer is None else Outcome.FAIL, answer)
