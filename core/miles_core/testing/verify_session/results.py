"""What a verification of sessions finds: events that were driven, checks that were made, and the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class Check(StrEnum):
    """What must be true of every turn or session; the values are what `verify session` prints."""

    ANSWERED = "answered"
    """Every request got the answer it must get."""
    PREFIX = "prefix"
    """A turn's prompt begins with its parent's checkpoint, up to the family's `max_trim_tokens`."""
    RECORDS = "records"
    """Session server, client and engine name the same prompt ids and the same sampled ids."""
    TEXT = "text"
    """The sampled ids spell the message that came with them."""
    SELF_CHECK = "self-check"
    """`tito_session_mismatch` has no hard difference."""
    SAMPLES = "samples"
    """Samples have the tokens, masks and log-probabilities of the turns they are made of."""
    RENDERING = "rendering"
    """The engine's own rendering of a first turn has the ids of ours."""


class Verdict(StrEnum):
    """How a verification ended."""

    PASS = "PASS"
    FAIL = "FAIL"
    INCOMPLETE = "INCOMPLETE"
    """Nothing failed, but something that had to happen did not."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """How often something happened in sessions of one history; `why` it did not, or why it need not, if known."""

    history: str
    name: str
    count: int
    required: bool
    why: str | None = None

    @property
    def missing(self) -> bool:
        """Whether it had to happen and did not."""
        return self.required and not self.count


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One check that did not hold: in which history, conversation and cycle (from 1), and what was found."""

    check: Check
    history: str
    conversation: str
    cycle: int
    text: str


@dataclass(frozen=True, kw_only=True)
class AssistantText:
    """Turns the model wrote freely and to their end, and how many of them are not canonically tokenized."""

    counted: int
    differing: int
    left_out: int
    """Turns that were forced or cut off, which say nothing about how the model writes."""
    left_out_differing: int
    """How many of those are not canonically tokenized either; what is forced mostly is not."""
    strayed: int
    """Turns whose self-check is not judged, since the model sampled what no message says, in them or before them."""
    limit: float

    @property
    def share(self) -> float:
        """Of the counted turns; 0 if there are none."""
        return self.differing / self.counted if self.counted else 0.0

    @property
    def exceeded(self) -> bool:
        """Whether the share is above the limit."""
        return self.share > self.limit


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """First turns that the engine rendered itself: how many told ids, how many only a number of tokens, how many none.

    `otherwise` counts those with other ids than ours for a known reason, whose like without tools are as ours.
    `unverified` says whether turns whose ids were not told are accepted.
    """

    asked: int
    otherwise: dict[str, int]
    told_ids: int
    told_count: int
    unverified: bool

    @property
    def not_told(self) -> int:
        """Turns of which the engine did not name the ids."""
        return self.asked - self.told_ids


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What was learned of the engine before sessions were driven."""

    urls: tuple[str, ...]
    serves: str | None
    """The model, as the engine names it."""
    forced: bool
    """Whether answers are forced by `regex`."""
    why_not: str | None
    """Why answers, or calls, are not forced."""
    same_tokenizer: bool | None
    """Whether `/tokenize` gave our ids; None if the engine has no such path."""


@dataclass(frozen=True, kw_only=True)
class SessionVerification:
    """Everything that was driven and checked."""

    family: str
    """`name@revision`."""
    engine: EngineFacts
    histories: tuple[str, ...]
    cycles: int
    turns: int
    streams: dict[str, int]
    """Streamed turns, by how they came: `live` or `whole`."""
    events: tuple[Event, ...]
    passed: dict[Check, int]
    failures: tuple[Failure, ...]
    assistant_text: AssistantText
    rendering: Rendering

    @property
    def missing(self) -> tuple[Event, ...]:
        """Events that had to happen and did not."""
        return tuple(event for event in self.events if event.missing)

    @property
    def verdict(self) -> Verdict:
        """FAIL goes before INCOMPLETE."""
        if self.failures or self.assistant_text.exceeded:
            return Verdict.FAIL
        unverified = self.rendering.not_told and not self.rendering.unverified
        if unverified or self.missing or not self.turns:
            return Verdict.INCOMPLETE
        return Verdict.PASS

    def failed(self, check: Check) -> tuple[Failure, ...]:
        """The failures of one check, in the order they were found."""
        return tuple(failure for failure in self.failures if failure.check is check)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where in a verification something was found."""

    history: str
    conversation: str
    cycle: int


@dataclass
class Ledger:
    """Counts while sessions are driven; one for a whole verification, in one event loop."""

    events: Counter[tuple[str, str]] = field(default_factory=Counter)
    passed: Counter[Check] = field(default_factory=Counter)
    streams: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    reasons: dict[tuple[str, str], str] = field(default_factory=dict)
    turns: int = 0
    counted: int = 0
    differing: int = 0
    left_out: int = 0
    left_out_differing: int = 0
    strayed: int = 0

    def happened(self, place: Place, name: str, times: int = 1) -> None:
        """Count an event."""
        self.events[place.history, name] += times

    def did_not_happen(self, place: Place, name: str, why: str) -> None:
        """Note why an event was tried and did not happen."""
        self.reasons.setdefault((place.history, name), why)

    def judge(self, check: Check, place: Place, faults: Iterable[str] | None) -> None:
        """Count a check as made; each fault is a failure. None: it could not be made, and is not counted."""
        if faults is None:
            return
        found = [
            Failure(check=check, history=place.history, conversation=place.conversation, cycle=place.cycle, text=text)
            for text in faults
        ]
        self.failures += found
        self.passed[check] += not found
