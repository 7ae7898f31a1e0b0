"""`miles-plugins verify`: proof that a family, or a bare template, fits a checkpoint; `session` adds an engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten, wrap
from typing import TYPE_CHECKING, Any

import click

from miles_core.cli.flags import template_kwargs
from miles_core.cli.output import claim_stdout, write, write_json
from miles_core.cli.verify_session import session_command
from miles_core.errors import ConfigError

if TYPE_CHECKING:
    from miles_core.plugins import Plugin, Registry
    from miles_core.testing.verify import Finding, TokenDifference, Tried, Verification
    from miles_core.tito import BoundFamily, ChatTemplate
    from miles_core.tito.drift import Drift, ProbeDrift

WIDTH = 80
SHOWN = 5
"""How many failures the table spells out; `--json` has all."""


@click.group("verify", help="Prove that a family, or a bare template, fits a checkpoint.")
def command() -> None:
    """The group; its commands are below, and in `verify_session`."""


command.add_command(session_command)


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What was verified, and what came out; both views are made from it."""

    bound: BoundFamily
    plugin: str | None
    """The family's plugin in words; None for a bare template."""
    checkpoint: str | None
    verification: Verification
    drift: Drift | None
    """None where the checkpoint's own template is the one that is verified."""
    strict: bool

    @property
    def drifted(self) -> bool:
        """Whether the checkpoint's own template writes something else."""
        return self.drift is not None and bool(self.drift.differences)

    @property
    def ok(self) -> bool:
        """Whether nothing failed; a drift counts where it was asked to."""
        return not self.verification.failed and not (self.strict and self.drifted)


@command.command("template")
@click.option("--checkpoint", "--hf-checkpoint", default=None, metavar="DIR|ID", help="The tokenizer and its template.")
@click.option(
    "--tito-model", default=None, metavar="FAMILY[@REVISION]",
    help="The model family; auto if not given, or none at all where --template is.",
)  # fmt: skip
@click.option(
    "--template", default=None, type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="A chat template in place of the checkpoint's own.",
)  # fmt: skip
@click.option(
    "--thinking", type=click.Choice(["on", "off", "both"]), default="both", show_default=True, help="What to try."
)
@click.option("--apply-chat-template-kwargs", default=None, metavar="JSON", help="Template kwargs of every turn.")
@click.option("--strict-template", is_flag=True, help="Fail if the checkpoint's own template differs.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
@click.pass_context
def template_command(
    ctx: click.Context,
    checkpoint: str | None,
    tito_model: str | None,
    template: Path | None,
    thinking: str,
    apply_chat_template_kwargs: str | None,
    strict_template: bool,
    as_json: bool,
) -> None:
    """Try a family's template on conversations of every kind, with a checkpoint's tokenizer.

    Each is played as a session would: appended messages must not rewrite what stands before them, the joined prompt
    must be the whole conversation's, the self-check must be clean, and parsing must give the sampled message back.
    The checkpoint's own template is compared with the family's. --template alone tries a template without a family.
    Exit code 1 if anything fails.
    """
    from miles_core.plugins import Registry
    from miles_core.testing.verify import verify
    from miles_core.tito.drift import find_drift

    kwargs = template_kwargs(apply_chat_template_kwargs)
    stdout = claim_stdout()
    bound, plugin, other = _bind(Registry.discover(), tito_model, checkpoint, template)
    with plugin.guard("tito_family") if plugin is not None else nullcontext():
        verification = verify(bound, thinking=thinking, kwargs=kwargs)
    result = Verified(
        bound=bound,
        plugin=plugin.describe() if plugin is not None else None,
        checkpoint=checkpoint,
        verification=verification,
        drift=None if bound.family.best_effort else find_drift(bound, other),
        strict=strict_template,
    )
    if as_json:
        write_json(as_result(result), stdout)
    else:
        write("\n\n".join(paragraphs(result)), stdout)
    ctx.exit(0 if result.ok else 1)


# -- what is verified ----------------------------------------------------------------------------------------


def _bind(
    registry: Registry, tito_model: str | None, checkpoint: str | None, template: Path | None
) -> tuple[BoundFamily, Plugin | None, ChatTemplate | None]:
    """What is verified, its plugin, and the template to compare with, if not the checkpoint's own."""
    from miles_core.plugins.families import AUTO, family_of, resolve
    from miles_core.testing.verify import bind_bare
    from miles_core.tito import ChatTemplate, load_tokenizer
    from miles_core.tito.tokenizer import special_token_variables

    text = _read(template) if template is not None else None
    tokenizer = load_tokenizer(checkpoint) if checkpoint is not None else None
    variables = special_token_variables(tokenizer.source) if tokenizer is not None else {}
    if text is not None and tito_model is None:
        return bind_bare(text, source=str(template), tokenizer=tokenizer, variables=variables), None, None
    if checkpoint is None or tokenizer is None:
        what = f"--tito-model {tito_model} needs" if tito_model else "give --template FILE, or"
        raise click.UsageError(f"{what} --checkpoint DIR, the directory that holds tokenizer.json")
    plugin = registry.load("family", resolve(registry, tito_model or AUTO, checkpoint))
    family = family_of(plugin)
    given = ChatTemplate(text, source=str(template), variables=variables) if text is not None else None
    with plugin.guard("tito_family"):
        brings_own = family.renderer_of(family.revision(plugin.revision)) is not None
        bound = family.bind(tokenizer, plugin.revision, template=None if brings_own else given)
    return bound, plugin, given if brings_own else None


def _read(template: Path) -> str:
    try:
        return template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--template {template}: {error}") from error


# -- the view for machines -----------------------------------------------------------------------------------


def as_result(result: Verified) -> dict[str, Any]:
    """Everything as JSON keys and values."""
    bound, found = result.bound, result.verification
    family = None
    if result.plugin is not None:
        family = {
            "name": bound.name,
            "revision": bound.revision.name,
            "revision_chosen": bound.revision_chosen,
            "plugin": result.plugin,
        }
    return {
        "ok": result.ok,
        "verdict": verdict(result),
        "family": family,
        "template": bound.template.source,
        "checkpoint": result.checkpoint,
        "counts": _counts(found),
        "trajectories": [_tried_result(tried) for tried in found.tried],
        "left_out": [{"thinking": thinking, "reason": reason} for thinking, reason in found.left_out.items()],
        "drift": _drift_result(result.drift),
    }


def _counts(found: Verification) -> dict[str, int]:
    from miles_core.testing.verify import Outcome

    return {outcome.value: found.count(outcome) for outcome in Outcome}


def _tried_result(tried: Tried) -> dict[str, Any]:
    return {
        "name": tried.trajectory,
        "thinking": tried.thinking,
        "outcome": tried.outcome.value,
        "reason": tried.skipped,
        "checks": [{"name": name, **_finding_result(found)} for name, found in tried.findings.items()],
    }


def _finding_result(found: Finding) -> dict[str, Any]:
    difference = found.difference
    return {
        "outcome": found.outcome.value,
        "reason": found.reason,
        "turn": found.turn,
        "difference": None if difference is None else vars(difference),
    }


def _drift_result(drift: Drift | None) -> dict[str, Any] | None:
    if drift is None:
        return None
    return {
        "template": drift.source,
        "not_compared": drift.unknown,
        "agreed": list(drift.agreed),
        "without_earlier_reasoning": list(drift.shorter),
        "declared": [{"probe": probe, "reason": reason} for probe, reason in drift.declared.items()],
        "differences": [
            {
                "probe": found.probe,
                "error": found.error,
                "difference": None if found.difference is None else vars(found.difference),
            }
            for found in drift.differences
        ],
    }


# -- the view for people -------------------------------------------------------------------------------------


def paragraphs(result: Verified) -> Iterator[str]:
    """What was verified, a table per way of thinking, failures in detail, the template's drift, the verdict."""
    yield _head(result)
    found = result.verification
    for thinking in dict.fromkeys(tried.thinking for tried in found.tried):
        yield f"thinking {thinking}\n" + _table(tried for tried in found.tried if tried.thinking == thinking)
    for thinking, reason in found.left_out.items():
        yield f"thinking {thinking}\n" + _wrapped(f"not tried: {reason}")
    if (reasons := _reasons(found.tried)) is not None:
        yield reasons
    failed = [tried for tried in found.tried if any(True for _ in tried.failures)]
    yield from (_failure(tried) for tried in failed[:SHOWN])
    if len(failed) > SHOWN:
        yield f"{len(failed) - SHOWN} more failed; --json has all of it"
    if result.drift is not None:
        yield _drift(result.drift)
    yield verdict(result)


def _head(result: Verified) -> str:
    bound = result.bound
    rows = {"template": bound.template.source, "checkpoint": result.checkpoint or f"none: {bound.tokenizer.source}"}
    if result.plugin is not None:
        rows = {"family": f"{bound.name}@{bound.revision.name}, {bound.revision_chosen}", "from": result.plugin, **rows}
    return "\n".join(f"{name:<10} {value}" for name, value in rows.items())


def _table(tried: Iterable[Tried]) -> str:
    """A row per trajectory; one that was not tried has the reason in place of its checks."""
    rows = list(tried)
    wide = max(len(one.trajectory) for one in rows)
    lines = [f"{'RESULT':<7}  {'TRAJECTORY':<{wide}}  {'APPEND':<7}  {'JOINED':<7}  {'CHECK':<7}  PARSED"]
    for one in rows:
        cells = "  ".join(f"{found.outcome.value:<7}" for found in one.findings.values())
        if one.skipped is not None:
            cells = shorten(one.skipped, WIDTH - wide - 11, placeholder=" …")
        lines.append(f"{one.outcome.value.upper():<7}  {one.trajectory:<{wide}}  {cells}".rstrip())
    return "\n".join(lines)


def _reasons(tried: Iterable[Tried]) -> str | None:
    """Why trajectories were skipped or differ as declared, each reason once."""
    from miles_core.testing.verify import Outcome

    named: dict[str, list[str]] = {}
    for one in tried:
        found = [f"differs: {f.reason}" for f in one.findings.values() if f.outcome is Outcome.DIFFERS and f.reason]
        for reason in [f"skip: {one.skipped}"] if one.skipped else found[:1]:
            named.setdefault(reason, []).append(one.trajectory)
    lines = [_wrapped(f"{reason} ({_listed(list(dict.fromkeys(names)))})") for reason, names in named.items()]
    return "\n".join(lines) if lines else None


def _listed(names: list[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _failure(tried: Tried) -> str:
    lines = [f"FAIL  {tried.trajectory}, thinking {tried.thinking}"]
    for check, found in tried.failures:
        place = f"{check}, turn {found.turn}" if found.turn else check
        lines.append(_wrapped(f"{place}: {found.reason}", indent="  "))
        if found.difference is not None:
            lines += _difference(found.difference)
    return "\n".join(lines)


def _difference(difference: TokenDifference) -> list[str]:
    return [
        f"    token {difference.index}, behind {difference.before!r}",
        f"      expected {difference.expected!r}",
        f"      found    {difference.actual!r}",
    ]


def _drift(drift: Drift) -> str:
    if drift.unknown is not None:
        return _wrapped(f"The checkpoint's own template was not compared: {drift.unknown}")
    parts = [f"writes {len(drift.agreed)} of {drift.probes} probes as the family does"]
    if drift.shorter:
        parts.append(f"leaves out earlier reasoning on {len(drift.shorter)}")
    parts += [f"differs on {probe} as declared: {reason}" for probe, reason in drift.declared.items()]
    if drift.differences:
        parts.append(f"DIFFERS on {len(drift.differences)}:")
    lines = [_wrapped(f"The template of {drift.source} {', '.join(parts)}")]
    lines += [line for found in drift.differences[:SHOWN] for line in _probe(found)]
    if len(drift.differences) > SHOWN:
        lines.append(f"  {len(drift.differences) - SHOWN} more differ; --json has all of it")
    return "\n".join(lines)


def _probe(found: ProbeDrift) -> list[str]:
    if found.difference is None:
        return [_wrapped(f"{found.probe}: {found.error}", indent="  ")]
    return [
        f"  {found.probe}",
        f"    template {found.difference.actual!r}",
        f"    family   {found.difference.expected!r}",
    ]


def _wrapped(text: str, indent: str = "") -> str:
    width = WIDTH - len(indent) - 2
    lines = [
        part for one in text.splitlines() for part in wrap(one, width, break_long_words=False, break_on_hyphens=False)
    ]
    return "\n".join(f"{indent}{'  ' if number else ''}{one}" for number, one in enumerate(lines))


def verdict(result: Verified) -> str:
    """The last line: PASS or FAIL, and the counts."""
    found = result.verification
    counts = _counts(found)
    others = [f"{counts[key]} {words}" for key, words in _WORDS.items() if counts[key]]
    text = f"{counts['pass']} of {len(found.tried)} trajectories pass"
    if result.plugin is None and found.failed:
        rewritten = sum(any(name == "append-only" for name, _ in tried.failures) for tried in found.tried)
        if rewritten:
            others.append(f"the template is not append-only on {rewritten}")
    head = "PASS" if result.ok else "FAIL"
    if result.drifted:
        head += f", {'but' if result.ok else 'and'} the checkpoint's own template differs"
    return f"{head}: {', '.join([text, *others])}"


_WORDS = {"fail": "fail", "differs": "differ as they may", "skip": "skipped"}
