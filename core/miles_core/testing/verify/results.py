"""What a verification finds: an outcome per check and trajectory, and what they add up to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from miles_core.tito import BoundFamily

CHECKS = ("append-only", "joined", "self-check", "parsed")
"""As they are shown: appended messages leave what stands before them as it was; the joined prompt equals the whole
conversation's; the self-check has nothing to say; parsing what was sampled gives the message."""


class Outcome(StrEnum):
    """How a check, or a whole trajectory, ended; the values are what `verify` prints."""

    PASS = "pass"
    DIFFERS = "differs"
    """As the family declares: history writes the turn otherwise than it was sampled."""
    SKIP = "skip"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True)
class TokenDifference:
    """The first place where two token sequences part, as text with a little context."""

    index: int
    before: str
    expected: str
    actual: str


@dataclass(frozen=True)
class Finding:
    """How one check of a trajectory ended, and why unless it passed. `turn` counts generations from 1."""

    outcome: Outcome
    reason: str | None = None
    turn: int | None = None
    difference: TokenDifference | None = None


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One trajectory with thinking `on`, `off`, or `none` where the format has no reasoning.

    `skipped` says why it was not tried; then there are no findings.
    """

    trajectory: str
    thinking: str
    findings: dict[str, Finding] = field(default_factory=dict)
    skipped: str | None = None

    @property
    def outcome(self) -> Outcome:
        """The gravest finding."""
        if self.skipped is not None:
            return Outcome.SKIP
        found = {finding.outcome for finding in self.findings.values()}
        return next((o for o in (Outcome.FAIL, Outcome.DIFFERS) if o in found), Outcome.PASS)

    @property
    def failures(self) -> Iterator[tuple[str, Finding]]:
        """The checks that failed, by name."""
        return ((name, found) for name, found in self.findings.items() if found.outcome is Outcome.FAIL)


@dataclass(frozen=True)
class Verification:
    """Every trajectory that was tried, and per way of thinking that was not tried, why."""

    tried: tuple[Tried, ...]
    left_out: dict[str, str] = field(default_factory=dict)

    def count(self, outcome: Outcome) -> int:
        """How many trajectories ended so."""
        return sum(tried.outcome is outcome for tried in self.tried)

    @property
    def failed(self) -> bool:
        """Whether any trajectory failed, or none could be tried at all."""
        return self.count(Outcome.FAIL) > 0 or self.count(Outcome.SKIP) == len(self.tried)


BEFORE, AFTER = 16, 16
"""How many tokens of context are shown on each side of a difference."""


def first_difference(bound: BoundFamily, expected: Sequence[int], actual: Sequence[int]) -> TokenDifference | None:
    """Where `actual` parts from `expected`; None if they are equal."""
    if list(expected) == list(actual):
        return None
    pairs = enumerate(zip(expected, actual, strict=False))
    index = next((i for i, (left, right) in pairs if left != right), min(len(expected), len(actual)))
    before, want, have = (
        bound.tokenizer.decode(ids)
        for ids in (
            expected[max(0, index - BEFORE) : index],
            expected[index : index + AFTER],
            actual[index : index + AFTER],
        )
    )
    return TokenDifference(index=index, before=before, expected=want, actual=have)
