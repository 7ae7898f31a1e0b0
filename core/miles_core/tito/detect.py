"""Which family a checkpoint is, how sure that is, and why. Pure: checkpoint and families are passed in.

Three things count: the config's `model_type`, the tokens that the family names, and how the checkpoint's own template
writes the probe conversations. The checkpoint's name and path do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from miles_core.errors import MilesError
from miles_core.tito.checkpoint import Checkpoint
from miles_core.tito.choose import Choice, rank_revisions
from miles_core.tito.family import Revision, TitoFamily
from miles_core.tito.probes import ProbeResult, first_difference


class Confidence(StrEnum):
    """How sure a family is; `certain` and `likely` are good enough to be taken where no other is as sure."""

    CERTAIN = "certain"
    LIKELY = "likely"
    POSSIBLE = "possible"
    NONE = "none"


_ORDER = tuple(Confidence)
_ENOUGH = (Confidence.CERTAIN, Confidence.LIKELY)


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How far a family and the checkpoint's own template write the probes alike.

    `first` are first turns, `settled` later turns that every template of the format writes alike, `kept` later turns
    in which templates may drop earlier reasoning and families keep it.
    """

    first: tuple[ProbeResult, ...] = ()
    settled: tuple[ProbeResult, ...] = ()
    kept: tuple[ProbeResult, ...] = ()

    @classmethod
    def of(cls, results: Sequence[ProbeResult]) -> Agreement:
        """The results by kind of probe."""
        return cls(
            first=tuple(r for r in results if r.first_turn),
            settled=tuple(r for r in results if not r.first_turn and not r.probe.rewritten),
            kept=tuple(r for r in results if not r.first_turn and r.probe.rewritten),
        )

    @property
    def compared(self) -> bool:
        """Whether there were two sides to compare."""
        return bool(self.first)

    @property
    def drift(self) -> tuple[ProbeResult, ...]:
        """The probes that differ although they must not: the format, or a template that was changed."""
        return tuple(r for r in (*self.first, *self.settled) if not r.agrees and r not in self.by_default)

    @property
    def by_default(self) -> tuple[ProbeResult, ...]:
        """First turns that say nothing of thinking and differ, while those that say it agree: another default."""
        plain = tuple(r for r in self.first if not r.probe.kwargs and not r.agrees)
        return plain if all(r.agrees for r in self.first if r.probe.kwargs) else ()

    @property
    def mostly(self) -> bool:
        """Whether more than half of the first turns agree."""
        return 2 * count(self.first) > len(self.first)


def count(results: Iterable[ProbeResult]) -> int:
    """How many agree."""
    return sum(result.agrees for result in results)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A family, judged: `selector` chooses it, `reasons` say what speaks for and against it.

    `verified` is whether the checkpoint's own template was seen to agree; `verification` says so in words.
    `missing` are tokens that the family names and the tokenizer lacks.
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
    verified: bool
    verification: str


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
    return Detection(
        candidates=ranked, chosen=_chosen(ranked), fallbacks=tuple(fallbacks), skipped=tuple(broken)
    )


def _rank(candidate: Candidate) -> tuple[object, ...]:
    agreement = candidate.agreement
    counts = [-count(part) for part in (agreement.first, agreement.settled, agreement.kept)]
    return (_ORDER.index(candidate.confidence), *counts, not candidate.declared, candidate.selector)


def _chosen(ranked: Sequence[Candidate]) -> Candidate | None:
    """The first, if it is sure enough and no other is as sure."""
    if not ranked or ranked[0].confidence not in _ENOUGH:
        return None
    rivals = [c for c in ranked[1:] if c.confidence is ranked[0].confidence]
    return None if rivals else ranked[0]


def _judge(checkpoint: Checkpoint, selector: str, family: TitoFamily) -> Candidate:
    choice = rank_revisions(family, checkpoint.config, checkpoint.template)
    named = named_tokens(family, choice.revision)
    missing = tuple(text for text in named if checkpoint.tokenizer.token_to_id(text) is None)
    unbound = None if missing else _unbound(checkpoint, family, choice.revision)
    declared = _declares(checkpoint, choice.revision)
    agreement = Agreement.of(choice.results)
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
    ]
    verified, verification = _verification(choice.revision, agreement)
    return Candidate(
        selector=selector, family=family, revision=choice.revision, confidence=confidence, reasons=tuple(reasons),
        declared=declared, missing=missing, tokens=len(named), agreement=agreement,
        verified=verified and not missing and not unbound, verification=verification,
    )  # fmt: skip


def named_tokens(family: TitoFamily, revision: Revision) -> tuple[str, ...]:
    """The texts that a family names as tokens of its checkpoints."""
    facts = revision.parse_facts or family.parse_facts
    groups = (
        family.stop_tokens or (), family.role_stop_tokens, family.boundary_tokens, family.inner_tokens, facts.tags
    )  # fmt: skip
    return tuple(dict.fromkeys(text for group in groups for text in group))


def _unbound(checkpoint: Checkpoint, family: TitoFamily, revision: Revision) -> str | None:
    """Why the family cannot be used with the tokenizer at all, if so."""
    try:
        bound = family.bind(checkpoint.tokenizer, revision.name)
        _ = bound.boundary_ids
    except MilesError as error:
        return error.message
    return None


def _declares(checkpoint: Checkpoint, revision: Revision) -> bool:
    found = checkpoint.model_type
    if found is None:
        return False
    value, where = found
    if where != "architectures":
        return value in revision.model_types
    plain = [name.replace("_", "") for name in (value.lower(), *revision.model_types)]
    return plain[0] in plain[1:]


def _confidence(
    checkpoint: Checkpoint, revision: Revision, agreement: Agreement, *, declared: bool
) -> Confidence:
    if agreement.compared:
        confidence = _by_template(agreement, declared=declared)
    elif not declared:
        confidence = Confidence.NONE
    elif checkpoint.template is None and not revision.may_lack_template:
        confidence = Confidence.POSSIBLE
    elif checkpoint.template_error:
        confidence = Confidence.POSSIBLE
    else:  # a family without a template to compare with, or a checkpoint that need not have one
        confidence = Confidence.LIKELY
    if checkpoint.not_chat and confidence in _ENOUGH:
        return Confidence.POSSIBLE
    return confidence


def _by_template(agreement: Agreement, *, declared: bool) -> Confidence:
    if agreement.drift:
        return Confidence.POSSIBLE if declared or agreement.mostly else Confidence.NONE
    if agreement.by_default:
        return Confidence.LIKELY if declared else Confidence.POSSIBLE
    return Confidence.CERTAIN if declared else Confidence.LIKELY


# -- in words ------------------------------------------------------------------------------------------------


def _type_reason(checkpoint: Checkpoint, revision: Revision, *, declared: bool) -> str:
    known = ", ".join(revision.model_types) or "it declares none"
    found = checkpoint.model_type
    if found is None:
        return f"the checkpoint's config names no model_type (the family's: {known})"
    value, where = found
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
    if agreement.drift:
        what = "the template has drifted from the family's" if agreement.mostly else "another format, it seems"
        reasons.append(f"{what}: {told(agreement.drift[0])}")
    if agreement.by_default:
        reasons.append(
            "the template's default for thinking is not the family's; the family's is used, so say "
            f"what you want in chat_template_kwargs: {told(agreement.by_default[0])}"
        )
    return reasons


def told(result: ProbeResult) -> str:
    """Where a family and a template part on a probe, in words."""
    if result.expected is None or result.actual is None:
        return f"probe {result.name}: {result.error}"
    difference = first_difference(result.expected, result.actual)
    if difference is None:
        return f"probe {result.name} agrees"
    return f"probe {result.name}: family {difference.expected!r}, template {difference.actual!r}"


def _revision_reasons(family: TitoFamily, choice: Choice) -> list[str]:
    if len(family.revisions) == 1:
        return []
    if choice.clear:
        return [f"revision {choice.revision.name}, {choice.how}"]
    return [f"the checkpoint does not tell the revision; {choice.revision.name} is the default"]


def _verification(revision: Revision, agreement: Agreement) -> tuple[bool, str]:
    """Whether this checkpoint was seen to agree, and what the family as such was checked against."""
    against = revision.verified or "nothing that its author names"
    if not agreement.compared:
        return False, f"not for this checkpoint, which has no template to compare with; the family against {against}"
    if agreement.drift or agreement.by_default:
        return False, f"not for this checkpoint, whose template differs; the family against {against}"
    seen = len(agreement.first) + len(agreement.settled)
    return True, f"by this checkpoint's own template on {seen} probes; the family against {against}"
