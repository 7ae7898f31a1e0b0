"""What a check is, and the report of a plugin's checks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
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
    WAIVED = "waived"
    """It failed, and the plugin's author said in words why it may."""


@dataclass(frozen=True)
class Skip:
    """A check's answer when it does not apply, or cannot be made here."""

    reason: str


CheckAnswer: TypeAlias = str | Skip | None
"""None if all is well, the reason as text if not, or Skip."""
CheckFunction: TypeAlias = Callable[[Plugin], CheckAnswer]
"""One check of a plugin, as a function."""


@dataclass(frozen=True)
class Check:
    """One named check of one plugin, and the reason unless it passed.

    What is `required`, every plugin of the kind must have; the rest it may lack, and then the check is skipped. What it
    has must be right either way.
    """

    name: str
    outcome: Outcome
    reason: str | None = None
    required: bool = True

    def line(self) -> str:
        """`fail  is reflexive: …`, as reports have it."""
        told = f": {self.reason}" if self.reason else ""
        return f"{self.outcome.value:<4}  {self.name}{'' if self.required else ' (optional)'}{told}"


@dataclass(frozen=True)
class Report:
    """All checks of one plugin."""

    plugin: str
    checks: tuple[Check, ...]

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.outcome is Outcome.FAIL)

    def text(self) -> str:
        """The plugin and a line for each check."""
        return "\n".join([self.plugin, *(f"  {check.line()}" for check in self.checks)])

    def waived(self, reasons: Mapping[str, str]) -> Report:
        """The same report, in which the checks named in `reasons` may fail. Raises ValueError for an unknown name."""
        unknown = sorted(reasons.keys() - {check.name for check in self.checks})
        if unknown:
            known = ", ".join(check.name for check in self.checks)
            raise ValueError(f"there is no check {unknown[0]!r} to waive; there are: {known}")
        return replace(self, checks=tuple(_waived(check, reasons.get(check.name)) for check in self.checks))


def _waived(check: Check, why: str | None) -> Check:
    if why is None or check.outcome is not Outcome.FAIL:
        return check
    return replace(check, outcome=Outcome.WAIVED, reason=f"{why} ({check.reason})")


DECISIVE = frozenset({"declares a family", "binds"})
"""Checks without which others have nothing to look at."""


def run_checks(
    plugin: Plugin, checks: Mapping[str, Callable[[], CheckAnswer]], optional: Collection[str]
) -> tuple[Check, ...]:
    """Run `checks` one after the other; what one raises is its failure, Ctrl-C excepted.

    Where one of `DECISIVE` fails, the rest would fail in the same way, and are skipped.
    """
    made: list[Check] = []
    failed: str | None = None
    for name, check in checks.items():
        known = (Outcome.SKIP, f"not tried, since {failed!r} failed") if failed else _outcome(plugin, check)
        made.append(Check(name, *known, required=name not in optional))
        failed = failed or (name if name in DECISIVE and known[0] is Outcome.FAIL else None)
    return tuple(made)


def _outcome(plugin: Plugin, check: Callable[[], CheckAnswer]) -> tuple[Outcome, str | None]:
    try:
        answer = check()
    except MilesError as error:
        return Outcome.FAIL, error.message
    except (Exception, SystemExit) as error:
        return Outcome.FAIL, said(error, plugin.module.__name__)
    if isinstance(answer, Skip):
        return Outcome.SKIP, answer.reason
    return (Outcome.PASS, None) if answer is None else (Outcome.FAIL, answer)
