"""`miles-plugins detect`: which family a checkpoint is, how sure that is, and why."""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from miles_core.cli.output import claim_stdout, table, write, write_json

if TYPE_CHECKING:
    from miles_core.tito.checkpoint import Checkpoint
    from miles_core.tito.detect import Candidate, Detection
    from miles_core.tito.drift import ProbeDrift
    from miles_core.tito.probes import ProbeResult

WIDTH = 80
"""Columns of the table and of the reasons below it."""


@click.command("detect")
@click.argument("checkpoint", metavar="CHECKPOINT")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
@click.pass_context
def command(ctx: click.Context, checkpoint: str, as_json: bool) -> None:
    """Say which model family CHECKPOINT (a directory or a Hugging Face id) is, how sure that is, and why.

    By its config's model_type, its tokens and its own chat template; never by its name. Exit code 1 if no
    family is sure.
    """
    from miles_core.plugins import Registry
    from miles_core.plugins.families import detect_family
    from miles_core.tito.checkpoint import read_checkpoint

    stdout = claim_stdout()
    facts = read_checkpoint(checkpoint)
    result = _result(checkpoint, facts, detect_family(Registry.discover(), facts))
    if as_json:
        write_json(result, stdout)
    else:
        write("\n\n".join(_paragraphs(result)), stdout)
    ctx.exit(0 if result["sure"] else 1)


# -- the result ----------------------------------------------------------------------------------------------


def _result(name: str, facts: Checkpoint, found: Detection) -> dict[str, Any]:
    from miles_core.plugins.families import advice

    return {
        "checkpoint": name,
        **_checkpoint(facts),
        "sure": found.chosen is not None,
        "family": found.chosen.selector if found.chosen else None,
        "candidates": [_candidate(candidate) for candidate in found.candidates],
        "skipped": [{"family": skipped.selector, "reason": skipped.reason} for skipped in found.skipped],
        "advice": list(advice(found, name)),
    }


def _checkpoint(facts: Checkpoint) -> dict[str, Any]:
    value, where = facts.model_type or (None, None)
    template = None
    if facts.template is not None:
        digest = hashlib.sha256(facts.template.text.encode("utf-8", "surrogatepass")).hexdigest()
        template = {"sha256": digest, "characters": len(facts.template.text)}
    return {
        "model_type": value,
        "model_type_from": where,
        "architectures": list(facts.architectures),
        "template": template,
        "template_error": facts.template_error,
        "tokens": {"added": len(facts.tokenizer.added_tokens), "special": len(facts.tokenizer.special_ids)},
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    agreement = candidate.agreement
    return {
        "family": candidate.selector,
        "revision": candidate.revision.name,
        "confidence": candidate.confidence.value,
        "model_type_fits": candidate.declared,
        "tokens": {"named": candidate.tokens, "missing": list(candidate.missing)},
        "first_turns": _counted(agreement.first),
        "calls": _counted(agreement.settled),
        "kept_reasoning": _counted(agreement.kept),
        "verified": candidate.verified.value,
        "checked_against": candidate.revision.verified or None,
        "reasons": list(candidate.reasons),
        "drift": [_drift(found) for found in agreement.drift],
        "known_differences": dict(agreement.known),
    }


def _counted(results: Sequence[ProbeResult]) -> dict[str, int] | None:
    if not results:
        return None
    return {"agree": sum(result.agrees for result in results), "of": len(results)}


def _drift(found: ProbeDrift) -> dict[str, Any]:
    difference = found.difference
    return {
        "probe": found.probe,
        "index": difference.index if difference else None,
        "family": difference.expected if difference else None,
        "template": difference.actual if difference else None,
        "error": found.error,
    }


# -- the view ------------------------------------------------------------------------------------------------


def _paragraphs(result: dict[str, Any]) -> Iterator[str]:
    fitting = [row for row in result["candidates"] if row["confidence"] != "none"]
    others = [row for row in result["candidates"] if row["confidence"] == "none"]
    yield "\n".join(_head(result))
    if fitting:
        headers = ("FAMILY", "SURE", "MODEL TYPE", "TOKENS", "FIRST TURNS", "CALLS", "VERIFIED")
        yield table(headers, map(_row, fitting))
    for row in fitting[:1] if result["sure"] else fitting:
        yield "\n".join([f"{row['family']}@{row['revision']} is {row['confidence']}:", *_items(row["reasons"])])
    if others:
        names = ", ".join(row["family"] for row in others)
        yield "\n".join(_wrapped(f"do not fit: {names}", ""))
    for skipped in result["skipped"]:
        yield "\n".join(_wrapped(f"not tried: {skipped['family']}: {' '.join(skipped['reason'].split())}", ""))
    yield "\n".join([_verdict(result), *_items(result["advice"])])


def _head(result: dict[str, Any]) -> Iterator[str]:
    kind = "none in its config"
    if result["model_type"]:
        inner = result["model_type_from"] != "model_type"
        value = result["model_type"]
        kind = (value if value.isprintable() else repr(value)) + (
            f" (from {result['model_type_from']})" if inner else ""
        )
    template = "none"
    if result["template"]:
        template = f"{result['template']['characters']} characters, sha256 {result['template']['sha256'][:12]}"
    elif result["template_error"]:
        template = "does not compile"
    yield f"checkpoint  {result['checkpoint']}"
    yield f"model_type  {kind}"
    yield f"template    {template}"
    yield f"tokens      {result['tokens']['added']} added, {result['tokens']['special']} of them special"


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    tokens = row["tokens"]
    return (
        row["family"],
        row["confidence"],
        "fits" if row["model_type_fits"] else "-",
        f"{tokens['named'] - len(tokens['missing'])} of {tokens['named']}",
        _share(row["first_turns"]),
        _share(row["calls"]),
        row["verified"],
    )


def _share(counted: dict[str, int] | None) -> str:
    return f"{counted['agree']} of {counted['of']}" if counted else "-"


def _verdict(result: dict[str, Any]) -> str:
    if result["sure"]:
        return f"It is {result['family']}."
    if any(row["confidence"] != "none" for row in result["candidates"]):
        return "Not sure which family it is."
    return "No installed family fits."


def _items(texts: Sequence[str]) -> Iterator[str]:
    for text in texts:
        yield from _wrapped(text, "  - ")


def _wrapped(text: str, bullet: str) -> list[str]:
    """Lines of at most WIDTH, words unbroken; a path or a flag with its value may stand out."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=bullet, subsequent_indent=" " * len(bullet),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
