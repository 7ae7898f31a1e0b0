"""Which family a checkpoint is, how sure that is, and why. Pure: checkpoint and families are passed in.

Three things count: the config's `model_type`, the tokens that the family names, and how the checkpoint's own template
writes the probe conversations. The checkpoint's name and path do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from miles_core.errors import MilesError
from miles_core.tito.bound import BoundFamily
from miles_core.tito.checkpoint import Checkpoint
from miles_core.tito.choose import Choice, rank_revisions
from miles_core.tito.drift import Drift, ProbeDrift, find_drift
from miles_core.tito.drift import line as describe_probe
from miles_core.tito.family import Revision, TitoFamily
from miles_core.tito.probes import ProbeResult, first_difference
from miles_core.tito.render import shown
from miles_core.tito.tokenizer import Tokenizer


class Confidence(StrEnum):
    """How sure a family is; `certain` and `likely` are good enough to be taken where no other is as sure.

    The config and the template both say so, one of them does, one does and the other speaks against it, or neither.
    """

    CERTAIN = "certain"
    LIKELY = "likely"
    POSSIBLE = "possible"
    NONE = "none"


class Verified(StrEnum):
    """What was seen to agree: this checkpoint's own template, only other data of the family's, or nothing."""

    CHECKPOINT = "checkpoint"
    FAMILY = "family"
    NO = "no"


_ORDER = tuple(Confidence)
_ENOUGH = (Confidence.CERTAIN, Confidence.LIKELY)
_EDITED = 0.8
"""From this closeness on a template is the family's with a change, even where the config says nothing."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How far a family and the checkpoint's own template write the probes alike.

    `first` are first turns, `settled` later turns that every template of the format writes alike, `kept` later turns
    in which templates may drop earlier reasoning and families keep it. `drift` are the probes that differ although
    they must not: another format, or a template that was changed. `known` are differences that the family declares.
    """

    first: tuple[ProbeResult, ...] = ()
    settled: tuple[ProbeResult, ...] = ()
    kept: tuple[ProbeResult, ...] = ()
    drift: tuple[ProbeDrift, ...] = ()
    known: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, results: Sequence[ProbeResult], found: Drift | None) -> Agreement:
        """The results by kind of probe, with what was `found` of drift if the family could be bound."""
        first = tuple(r for r in results if r.first_turn)
        settled = tuple(r for r in results if not r.first_turn and not r.probe.rewritten)
        known = found.declared if found else {}
        passed = {*known, *(found.agreed if found else ())}
        drift = {d.probe: d for d in (found.differences if found else ())}
        for result in (*first, *settled):
            if not result.agrees and result.name not in passed:
                drift.setdefault(result.name, _drift_of(result))
        kept = tuple(r for r in results if not r.first_turn and r.probe.rewritten)
        return cls(first=first, settled=settled, kept=kept, drift=tuple(drift.values()), known=known)

    @property
    def compared(self) -> bool:
        """Whether there were two sides to compare."""
        return bool(self.first)

    @property
    def closeness(self) -> float:
        """How much of the first turns is the same text at start and end, from 0 to 1; tells an edit from a format."""
        shares = [_share(r.expected, r.actual) for r in self.first]
        return sum(shares) / len(shares) if shares else 0.0


def _drift_of(result: ProbeResult) -> ProbeDrift:
    difference = None
    if result.expected is not None and result.actual is not None:
        difference = first_difference(result.expected, result.actual)
    return ProbeDrift(probe=result.name, difference=difference, error=result.error)


def _share(one: str | None, other: str | None) -> float:
    """The common start and end of two texts, as a share of the longer one."""
    if one is None or other is None:
        return float(one is other)
    shorter = min(len(one), len(other))
    start = next((n for n in range(shorter) if one[n] != other[n]), shorter)
    end = next((n for n in range(shorter - start) if one[-1 - n] != other[-1 - n]), shorter - start)
    return (start + end) / max(len(one), len(other), 1)


def count(results: Iterable[ProbeResult]) -> int:
    """How many agree."""
    return sum(result.agrees for result in results)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A family, judged: `selector` chooses it, `reasons` say what speaks for and against it.

    `declared` is whether the family declares the checkpoint's `model_type`. `missing` are those of the `tokens` tokens
    it names that the tokenizer lacks.
    """

    selector: str
    family: TitoFamily
    revision: Revision
    confidence: Confidence
    reasons: tuple[str, ...]
    declared: bool
    missing: tuple[str, ...]
    tokens: int
    agreement: Agreement
    verified: Verified

    @property
    def brief(self) -> str:
        """How sure, and the three things that count, in a line."""
        facts = [
            f"model_type {'fits' if self.declared else 'does not tell'}",
            f"{len(self.missing)} of {self.tokens} tokens are missing" if self.missing else "its tokens are there",
        ]
        if self.agreement.compared:
            first, settled = self.agreement.first, self.agreement.settled
            facts.append(
                f"{count(first)} of {len(first)} first turns and {count(settled)} of {len(settled)} calls agree"
            )
        else:
            facts.append("no template to compare with")
        return f"{self.confidence}: {', '.join(facts)}"


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A family that could not be judged, and why."""

    selector: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Detection:
    """Every family judged, the most likely first; `chosen` is the one that is sure enough, if there is one.

    `fallbacks` select the families that take any checkpoint with a template, best effort; `skipped` are the broken.
    """

    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    fallbacks: tuple[str, ...]
    skipped: tuple[Skipped, ...]

    @property
    def fitting(self) -> tuple[Candidate, ...]:
        """The candidates that something speaks for."""
        return tuple(c for c in self.candidates if c.confidence is not Confidence.NONE)


def detect(
    checkpoint: Checkpoint, families: Iterable[tuple[str, TitoFamily]], skipped: Iterable[Skipped] = ()
) -> Detection:
    """Judge each of `families` (with its selector); one that raises is skipped, like those that did not load."""
    candidates, fallbacks, broken = [], [], list(skipped)
    for selector, family in families:
        try:
            if family.best_effort:
                fallbacks.append(selector)
            else:
                candidates.append(_judge(checkpoint, selector, family))
        except Exception as error:  # facts and encoders of somebody else's may raise anything
            broken.append(Skipped(selector=selector, reason=f"failed: {type(error).__name__}: {error}"))
    ranked = tuple(sorted(candidates, key=_rank))
    return Detection(candidates=ranked, chosen=_chosen(ranked), fallbacks=tuple(fallbacks), skipped=tuple(broken))


def _rank(candidate: Candidate) -> tuple[object, ...]:
    agreement = candidate.agreement
    counts = [-count(part) for part in (agreement.first, agreement.settled, agreement.kept)]
    order = _ORDER.index(candidate.confidence)
    return (order, *counts, -agreement.closeness, not candidate.declared, candidate.selector)


def _chosen(ranked: Sequence[Candidate]) -> Candidate | None:
    """The first, if it is sure enough and no other is as sure."""
    if not ranked or ranked[0].confidence not in _ENOUGH:
        return None
    rivals = [c for c in ranked[1:] if c.confidence is ranked[0].confidence]
    return None if rivals else ranked[0]


def _judge(checkpoint: Checkpoint, selector: str, family: TitoFamily) -> Candidate:
    choice = rank_revisions(family, checkpoint.config, checkpoint.template)
    named = named_tokens(family, choice.revision)
    missing = tuple(text for text in named if not _is_token(checkpoint.tokenizer, text))
    bound, unbound = (None, None) if missing else _bound(checkpoint, family, choice.revision)
    declared = _declares(checkpoint, choice.revision)
    drift = find_drift(bound, checkpoint.template) if bound and checkpoint.template else None
    agreement = Agreement.of(choice.results, drift)
    confidence = _confidence(checkpoint, choice.revision, agreement, declared=declared)
    if missing or unbound:
        confidence = Confidence.NONE
    reasons = [
        _type_reason(checkpoint, choice.revision, declared=declared),
        _token_reason(named, missing),
        *([unbound] if unbound else []),
        *_template_reasons(checkpoint, choice.revision, agreement),
        *([checkpoint.not_chat] if checkpoint.not_chat else []),
        *_revision_reasons(family, choice),
        f"the family was checked against {choice.revision.verified or 'nothing that it names'}",
    ]
    return Candidate(
        selector=selector, family=family, revision=choice.revision, confidence=confidence, reasons=tuple(reasons),
        declared=declared, missing=missing, tokens=len(named), agreement=agreement,
        verified=_verified(choice.revision, agreement, confidence),
    )  # fmt: skip


def _is_token(tokenizer: Tokenizer, text: str) -> bool:
    """Whether text becomes the token of that spelling; one in the vocabulary alone is never made of it."""
    number = tokenizer.token_to_id(text)
    return number is not None and tokenizer.encode(text) == [number]


def named_tokens(family: TitoFamily, revision: Revision) -> tuple[str, ...]:
    """The texts that a family names as tokens of its checkpoints."""
    facts = revision.parse_facts or family.parse_facts
    groups = (
        family.stop_tokens or (), family.role_stop_tokens, family.boundary_tokens, family.inner_tokens, facts.tags
    )  # fmt: skip
    return tuple(dict.fromkeys(text for group in groups for text in group))


def _bound(checkpoint: Checkpoint, family: TitoFamily, revision: Revision) -> tuple[BoundFamily | None, str | None]:
    """The family on the checkpoint's tokenizer, or why it cannot be used with it at all."""
    try:
        bound = family.bind(checkpoint.tokenizer, revision.name)
        _ = bound.boundary_ids
    except MilesError as error:
        return None, error.message
    return bound, None


def _declares(checkpoint: Checkpoint, revision: Revision) -> bool:
    found = checkpoint.model_type
    if found is None:
        return False
    value, where = found
    if where != "architectures":
        return value in revision.model_types
    plain = [name.replace("_", "") for name in (value.lower(), *revision.model_types)]
    return plain[0] in plain[1:]


def _confidence(checkpoint: Checkpoint, revision: Revision, agreement: Agreement, *, declared: bool) -> Confidence:
    if agreement.compared:
        confidence = _by_template(agreement, declared=declared)
    elif not declared:
        confidence = Confidence.NONE
    elif (checkpoint.template is None and not revision.may_lack_template) or checkpoint.template_error:
        confidence = Confidence.POSSIBLE
    else:  # a family without a template to compare with, or a checkpoint that need not have one
        confidence = Confidence.LIKELY
    if checkpoint.not_chat and confidence in _ENOUGH:
        return Confidence.POSSIBLE
    return confidence


def _by_template(agreement: Agreement, *, declared: bool) -> Confidence:
    if agreement.drift:
        return Confidence.POSSIBLE if declared or agreement.closeness >= _EDITED else Confidence.NONE
    return Confidence.CERTAIN if declared else Confidence.LIKELY


def _verified(revision: Revision, agreement: Agreement, confidence: Confidence) -> Verified:
    if confidence is Confidence.NONE or agreement.drift:
        return Verified.NO
    if agreement.compared:
        return Verified.CHECKPOINT
    return Verified.FAMILY if revision.verified else Verified.NO


# -- in words ------------------------------------------------------------------------------------------------


def _type_reason(checkpoint: Checkpoint, revision: Revision, *, declared: bool) -> str:
    known = ", ".join(revision.model_types) or "it declares none"
    found = checkpoint.model_type
    if found is None:
        return f"the checkpoint's config names no model_type (the family's: {known})"
    value, where = found
    value = value if value.isprintable() else shown(value)
    return f"{where} {value} is one of the family's" if declared else f"{where} {value} is not the family's ({known})"


def _token_reason(named: Sequence[str], missing: Sequence[str]) -> str:
    if missing:
        return f"the tokenizer lacks {', '.join(map(repr, missing))} of the {len(named)} tokens that the family names"
    return f"the tokenizer has all {len(named)} tokens that the family names"


def _template_reasons(checkpoint: Checkpoint, revision: Revision, agreement: Agreement) -> list[str]:
    if checkpoint.template_error:
        return [f"nothing to compare with: {checkpoint.template_error}"]
    if checkpoint.template is None:
        usual = "as checkpoints of this family may" if revision.may_lack_template else "unlike those of this family"
        return [f"the checkpoint has no chat template, {usual}"]
    if not agreement.compared:
        return ["the family follows the checkpoint's own template: there is nothing to compare"]
    later = (*agreement.settled, *agreement.kept)
    reasons = [
        f"{count(agreement.first)} of {len(agreement.first)} first turns and {count(later)} of {len(later)} later ones "
        "are written as the checkpoint's own template writes them"
    ]
    if count(later) < len(later) and not agreement.drift:
        reasons.append("on the other later turns it only leaves out earlier reasoning, which the family keeps")
    if agreement.drift:
        close = agreement.closeness >= _EDITED
        what = "the template has drifted from the family's" if close else "the template is another format, it seems"
        reasons.append(f"{what}: {describe_probe(agreement.drift[0])}")
    reasons += [f"probe {name} differs, as the family says: {why}" for name, why in agreement.known.items()]
    return reasons


def _revision_reasons(family: TitoFamily, choice: Choice) -> list[str]:
    if len(family.revisions) == 1:
        return []
    if choice.clear:
        return [f"revision {choice.revision.name}, {choice.how}"]
    return [f"the checkpoint does not tell the revision; {choice.revision.name} is the default"]
