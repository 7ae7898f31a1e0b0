"""Whether a checkpoint's own template still writes what the family writes: vendors change it under a fixed name.

First turns must agree to the token. Later turns may differ in what an append-only template cannot follow: the reasoning
of earlier turns, which checkpoints' templates leave out and families keep. Everything else is a drift.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.errors import ConfigError, MilesError
from miles_core.tito.probes import PROBES, Difference, Probe, ProbeResult, compare_with_template, first_difference
from miles_core.tito.render import ChatTemplate
from miles_core.tito.tokenizer import load_chat_template, special_token_variables

if TYPE_CHECKING:
    from miles_core.tito.bound import BoundFamily
    from miles_core.tito.render import Renderer

log = logging.getLogger("miles.tito")

SHOWN = 4
"""How many probes a message spells out."""

_TAGS = ("<think>", "</think>")
"""Around reasoning, for families that do not say."""


@dataclass(frozen=True, kw_only=True)
class ProbeDrift:
    """A probe on which the checkpoint's template differs: where, or with which error one of the two refuses it."""

    probe: str
    difference: Difference | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Drift:
    """How a template compares with the family, probe by probe.

    `source` names the template. `shorter` are the probes on which it only leaves out reasoning of earlier turns,
    `declared` those on which it may differ, with the family's reason. Where nothing was compared, `unknown` says why;
    `broken` says that there is a template, which cannot be read.
    """

    source: str
    agreed: tuple[str, ...] = ()
    shorter: tuple[str, ...] = ()
    declared: Mapping[str, str] = field(default_factory=dict)
    differences: tuple[ProbeDrift, ...] = ()
    unknown: str | None = None
    broken: bool = False

    @property
    def probes(self) -> int:
        """How many were compared."""
        return len(self.agreed) + len(self.shorter) + len(self.declared) + len(self.differences)


def find_drift(bound: BoundFamily, template: Renderer | None = None, *, probes: Sequence[Probe] = PROBES) -> Drift:
    """Compare a family with a template, the checkpoint's own by default. Never raises."""
    if template is None:
        source = bound.tokenizer.source
        try:
            template = _own_template(Path(source)) if source else None
        except MilesError as error:
            return Drift(source=source, unknown=error.message, broken=True)
        if template is None:
            return Drift(source=source, unknown=f"{source or 'the tokenizer'} carries no chat template")
    try:
        results = compare_with_template(bound.family, bound.revision, template, probes)
        if results:
            return _sorted(bound, template.source, results)
    except Exception as error:  # facts and encoders of somebody else's may raise anything
        return Drift(source=template.source, unknown=f"{type(error).__name__}: {error}", broken=True)
    return Drift(source=template.source, unknown=f"family {bound.name} has no template of its own to compare with")


def check_template(bound: BoundFamily, *, strict: bool) -> None:
    """At start-up: warn of a checkpoint whose own template differs; with `strict`, raise ConfigError instead."""
    drift = find_drift(bound)
    if drift.broken:
        log.warning(
            "the chat template of %s was not compared with family %s: %s", drift.source, bound.name, drift.unknown
        )
    if not drift.differences:
        return
    if strict:
        raise ConfigError(f"--strict-template: {describe(bound, drift)}")
    log.warning("%s", describe(bound, drift))


def describe(bound: BoundFamily, drift: Drift) -> str:
    """A drift in words: each probe with the first differing text, and what to do."""
    head = (
        f"the chat template of {drift.source} is not the one that family {bound.name}@{bound.revision.name} follows: "
        f"it differs on {len(drift.differences)} of {drift.probes} probes"
    )
    lines = [head, *map(line, drift.differences[:SHOWN])]
    if len(drift.differences) > SHOWN:
        lines.append(f"and {len(drift.differences) - SHOWN} more")
    lines += [
        "sessions follow the family's; a newer release, or a model that learned another format, needs another family",
        f"see miles-plugins detect {drift.source}, and miles-plugins verify template for all of it",
    ]
    return "\n  ".join(lines)


def line(drift: ProbeDrift) -> str:
    """One probe's difference, in a line."""
    if drift.difference is None:
        return f"{drift.probe}: {drift.error}"
    return f"{drift.probe}: it writes {drift.difference.actual!r}, the family {drift.difference.expected!r}"


def _own_template(root: Path) -> Renderer | None:
    text = load_chat_template(root)
    if text is None:
        return None
    return ChatTemplate(text, source=str(root), variables=special_token_variables(root))


def _sorted(bound: BoundFamily, source: str, results: list[ProbeResult]) -> Drift:
    """The probes by how they came out."""
    agreed, shorter, differences = list[str](), list[str](), list[ProbeDrift]()
    declared = dict[str, str]()
    for result in results:
        if result.agrees or _same_ids(bound, result):
            agreed.append(result.name)
        elif result.name in bound.family.template_differs:
            declared[result.name] = bound.family.template_differs[result.name]
        elif (found := _drift(bound, result)) is None:
            shorter.append(result.name)
        else:
            differences.append(found)
    return Drift(
        source=source,
        agreed=tuple(agreed),
        shorter=tuple(shorter),
        declared=declared,
        differences=tuple(differences),
    )


def _same_ids(bound: BoundFamily, result: ProbeResult) -> bool:
    """Whether two texts that differ (in how characters are composed, say) are one to the tokenizer."""
    if result.expected is None or result.actual is None:
        return False
    try:
        return bound.encode(result.expected) == bound.encode(result.actual)
    except MilesError:  # a template may write what is no Unicode text
        return False


def _drift(bound: BoundFamily, result: ProbeResult) -> ProbeDrift | None:
    """What is wrong with a probe that does not agree; None if the template only leaves out earlier reasoning."""
    if result.expected is None or result.actual is None:
        return ProbeDrift(probe=result.name, error=result.error)
    texts = [result.expected]
    if not result.first_turn:
        actual = _without_empty(bound, result.actual)
        texts = [_without_empty(bound, text) for text in (result.expected, *_forgetful(bound, result.probe))]
        if actual in texts:
            return None
    else:
        actual = result.actual
    found = [difference for text in texts if (difference := first_difference(text, actual)) is not None]
    return ProbeDrift(probe=result.name, difference=max(found, key=lambda difference: difference.index))


def _forgetful(bound: BoundFamily, probe: Probe) -> Iterator[str]:
    """What the family writes when the reasoning of the first turn is left out, of the first two, and so on."""
    messages = list(probe.messages)
    kwargs = {**probe.kwargs, **bound.fixed_kwargs}
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            messages[at] = {k: v for k, v in message.items() if k not in ("reasoning_content", "reasoning")}
            try:
                yield bound.render(messages, list(probe.tools), kwargs, True)
            except MilesError:  # a format may not take a turn without reasoning
                continue


def _without_empty(bound: BoundFamily, text: str) -> str:
    """The text without the reasoning blocks that hold nothing, and without closing tags of blocks not opened.

    A block at the end is the generation prompt's, and stays.
    """
    opener, closer = map(re.escape, bound.parse_facts.reasoning or _TAGS)
    blocks = re.compile(rf"{opener}(?P<inside>.*?){closer}\n{{0,2}}|{closer}\n{{0,2}}", re.DOTALL)

    def kept(found: re.Match[str]) -> str:
        return found[0] if (found["inside"] or "").strip() or found.end() == len(text) else ""

    return blocks.sub(kept, text)
