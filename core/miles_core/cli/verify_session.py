"""`miles-plugins verify session`: proof that a family, a checkpoint and a real engine keep tokens exact together."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING, Any

import click

from miles_core.cli.flags import HISTORIES, check_is_no_address, located, template_kwargs
from miles_core.cli.output import claim_stdout, table, write, write_json

if TYPE_CHECKING:
    from miles_core.engine.base import Engine
    from miles_core.plugins import Registry
    from miles_core.server.settings import ServerSettings
    from miles_core.testing.verify_session import Failure, Options, SessionVerification

WIDTH = 80
SHOWN = 5
"""How many failures the table spells out; `--json` has all."""

BOTH = ("linear", "tree")


@dataclass(frozen=True, kw_only=True)
class VerifiedSessions:
    """What was verified, and what came out; both views are made from it."""

    settings: ServerSettings
    engine: str
    """As given: a plugin's name, or `URL`."""
    options: Options
    found: SessionVerification

    @property
    def ok(self) -> bool:
        """Whether the verdict is PASS."""
        return self.found.verdict.value == "PASS"


@click.command(
    "session",
    help="Drive sessions against a real engine and check every token. An engine's own flags may follow.",
    context_settings={"ignore_unknown_options": True},
)
@click.option("--checkpoint", "--hf-checkpoint", metavar="DIR|ID", help="The tokenizer; --model's by default.")
@click.option("--model", metavar="DIR|ID", help="The weights, for an engine we start; --checkpoint by default.")
@click.option(
    "--tito-model", default="auto", show_default=True, metavar="FAMILY[@REVISION]", help="The model family, or auto."
)
@click.option(
    "--engine", "engines", multiple=True, default=("local",), show_default="local", metavar="URL|NAME",
    help="Engine URLs, or the name of an engine to start.",
)  # fmt: skip
@click.option(
    "--history", type=click.Choice([*HISTORIES, "both"]), default="both", show_default=True,
    help="Which kind of history to drive.",
)  # fmt: skip
@click.option(
    "--cycles", default=2, show_default=True, type=click.IntRange(min=1), help="Rounds, each with other seeds."
)
@click.option("--seed", default=1, show_default=True, type=int, help="Of questions and of sampling.")
@click.option(
    "--max-tokens", default=256, show_default=True, type=click.IntRange(min=1), help="Tokens a turn may have."
)
@click.option(
    "--max-assistant-text-share", default=0.2, show_default=True, type=click.FloatRange(0, 1),
    help="Turns that may be tokenized otherwise than the tokenizer would, of those the model wrote freely.",
)  # fmt: skip
@click.option(
    "--allow-unverified-rendering", is_flag=True, help="Pass engines that do not tell their own prompt's ids."
)
@click.option("--message-matcher", default="strict", show_default=True, metavar="NAME", help="As of serve.")
@click.option("--apply-chat-template-kwargs", default=None, metavar="JSON", help="Template kwargs of every session.")
@click.option("--chat-template-path", default=None, metavar="FILE", help="A chat template, for --tito-model default.")
@click.option("--engine-api-key", envvar="MILES_ENGINE_API_KEY", default=None, help="Key to send to the engine.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
@click.argument("engine_options", nargs=-1, type=click.UNPROCESSED, metavar="[ENGINE FLAGS]...")
@click.pass_context
def session_command(
    ctx: click.Context,
    /,
    engines: tuple[str, ...],
    history: str,
    cycles: int,
    seed: int,
    max_tokens: int,
    max_assistant_text_share: float,
    allow_unverified_rendering: bool,
    as_json: bool,
    engine_options: tuple[str, ...],
    **flags: Any,
) -> None:
    """Start the engine if it is ours, drive the sessions, say what came out. Exit code 1 unless all is well."""
    from miles_core.plugins import Registry
    from miles_core.testing.verify_session import Options

    options = Options(
        histories=BOTH if history == "both" else (HISTORIES[history],),
        cycles=cycles,
        seed=seed,
        max_tokens=max_tokens,
        max_assistant_text_share=max_assistant_text_share,
        allow_unverified_rendering=allow_unverified_rendering,
    )
    stdout = claim_stdout()
    logging.getLogger("miles.session").setLevel(logging.ERROR)  # it would warn of every retry, and they are ours
    result = _verify(Registry.discover(), engines, engine_options, options, flags)
    if as_json:
        write_json(as_result(result), stdout)
    else:
        write("\n\n".join(paragraphs(result)), stdout)
    ctx.exit(0 if result.ok else 1)


# -- what is verified ----------------------------------------------------------------------------------------


def _verify(
    registry: Registry, engines: Sequence[str], own_flags: Sequence[str], options: Options, flags: dict[str, Any]
) -> VerifiedSessions:
    """Load the family before an engine is started, so that what is wrong with it is told at once."""
    from dataclasses import replace

    from miles_core.plugins.families import resolve
    from miles_core.server.parts import load_parts
    from miles_core.server.settings import ServerSettings
    from miles_core.testing.verify_session import verify_session

    model = flags.pop("model")
    checkpoint = flags.pop("checkpoint") or model
    if checkpoint is None:
        raise click.UsageError("--checkpoint is missing: give the directory (or id) that holds the model's tokenizer")
    _check_engines(engines, own_flags)
    kwargs = template_kwargs(flags.pop("apply_chat_template_kwargs"))
    family = resolve(registry, flags.pop("tito_model"), checkpoint)
    settings = ServerSettings(
        checkpoint=checkpoint, tito_model=family, engine_urls=(), chat_template_kwargs=kwargs, **flags
    )
    parts = load_parts(replace(settings, history="tree"), registry)
    with ExitStack() as stack:
        urls = tuple(engine.rstrip("/") for engine in engines)
        if "://" not in engines[0]:
            engine = _start(registry, engines[0], model or checkpoint, settings, own_flags)
            stack.callback(engine.close)
            urls = tuple(engine.urls)
        settings = replace(settings, engine_urls=urls)
        found = verify_session(settings, options, parts=parts)
    return VerifiedSessions(
        settings=settings,
        engine=engines[0] if "://" not in engines[0] else "URL",
        options=options,
        found=found,
    )


def _check_engines(engines: Sequence[str], own_flags: Sequence[str]) -> None:
    """Raises UsageError unless they are URLs, or one name; only an engine started here has flags of its own."""
    named = [engine for engine in engines if "://" not in engine]
    if named and len(engines) > 1:
        raise click.UsageError(f"--engine {' --engine '.join(engines)}: give URLs, or one engine's name")
    for name in named:
        check_is_no_address(name)
    if own_flags and not named:
        raise click.UsageError(f"No such option: {own_flags[0]} (the engine at {engines[0]} runs already)")


def _start(registry: Registry, name: str, model: str, settings: ServerSettings, own_flags: Sequence[str]) -> Engine:
    from miles_core.engine.base import EngineConfig
    from miles_core.engine.launch import launch

    config = EngineConfig(
        model=located(model),
        checkpoint=located(settings.checkpoint),
        tito_model=settings.tito_model,
        options=tuple(own_flags),
        progress=lambda line: click.echo(line, err=True),
    )
    return launch(registry.load("engine", name), config)


# -- the view for machines -----------------------------------------------------------------------------------


def as_result(result: VerifiedSessions) -> dict[str, Any]:
    """Everything as JSON keys and values."""
    found, options = result.found, result.options
    text, rendering, engine = found.assistant_text, found.rendering, found.engine
    return {
        "ok": result.ok,
        "verdict": found.verdict.value,
        "summary": verdict(result),
        "family": found.family,
        "checkpoint": result.settings.checkpoint,
        "engine": {
            "given": result.engine,
            "urls": list(engine.urls),
            "serves": engine.serves,
            "same_tokenizer": engine.same_tokenizer,
            "forced": engine.forced,
            "not_forced": engine.why_not,
        },
        "histories": list(found.histories),
        "cycles": found.cycles,
        "seed": options.seed,
        "turns": found.turns,
        "streams": found.streams,
        "events": [{**vars(event), "missing": event.missing} for event in found.events],
        "checks": [
            {
                "name": check.value,
                "passed": passed,
                "failures": [_failure_result(failure) for failure in found.failed(check)],
            }
            for check, passed in found.passed.items()
        ],
        "assistant_text": {**vars(text), "share": text.share, "exceeded": text.exceeded},
        "rendering": {**vars(rendering), "not_told": rendering.not_told},
    }


def _failure_result(failure: Failure) -> dict[str, Any]:
    return {
        "history": failure.history,
        "conversation": failure.conversation,
        "cycle": failure.cycle,
        "text": failure.text,
    }


# -- the view for people -------------------------------------------------------------------------------------


def paragraphs(result: VerifiedSessions) -> Iterator[str]:
    """What was verified, the events, the checks, failures in detail, the verdict."""
    found = result.found
    yield _head(result)
    yield _events(found)
    if reasons := _reasons(found):
        yield reasons
    yield _checks(found)
    different = list({(failure.check, failure.text): failure for failure in reversed(found.failures)}.values())[::-1]
    yield from (_failure(failure) for failure in different[:SHOWN])
    if (more := len(found.failures) - len(different[:SHOWN])) > 0:
        yield f"{more} more failed; --json has all of it"
    yield verdict(result)


def _head(result: VerifiedSessions) -> str:
    found = result.found
    name = "" if result.engine == "URL" else f"{result.engine} at "
    serves = f", serves {found.engine.serves}" if found.engine.serves else ""
    answers = "forced by regex, and free ones" if found.engine.forced else "asked for"
    if found.engine.why_not:
        answers += f" ({found.engine.why_not})"
    streams = ", ".join(f"{count} {how}" for how, count in found.streams.items())
    rows = {
        "family": found.family,
        "checkpoint": result.settings.checkpoint,
        "engine": f"{name}{', '.join(found.engine.urls)}{serves}",
        "answers": answers,
        "driven": f"{found.turns} turns in {found.cycles} cycles of {' and '.join(found.histories)} histories, "
        f"seed {result.options.seed}",
        "streamed": streams or "none",
    }
    return "\n".join(_wrapped(f"{key:<10} {value}", 11) for key, value in rows.items())


def _events(found: SessionVerification) -> str:
    """A row per event, a column per history; `-` where it belongs to another history."""
    counts = {(event.name, event.history): str(event.count) for event in found.events}
    names = dict.fromkeys(event.name for event in found.events)
    rows = [[name, *(counts.get((name, history), "-") for history in found.histories)] for name in names]
    return table(["EVENT", *(history.upper() for history in found.histories)], rows)


def _reasons(found: SessionVerification) -> str:
    """Why events did not happen, each reason once."""
    named: dict[tuple[str, str], list[str]] = {}
    for event in found.events:
        if not event.count:
            word = "did not happen" if event.missing else "not needed"
            why = event.why or "their conversations ended before"
            named.setdefault((word, why), []).append(f"{event.name} ({event.history})")
    lines = (f"{word}: {', '.join(names)}: {why}" for (word, why), names in named.items())
    return "\n".join(map(_wrapped, lines))


def _checks(found: SessionVerification) -> str:
    rows = [[check.value, str(passed), str(len(found.failed(check)))] for check, passed in found.passed.items()]
    text, rendering = found.assistant_text, found.rendering
    lines = [
        f"assistant text: {text.differing} of {text.counted} free turns are not tokenized as the tokenizer would "
        f"({text.share:.1%}, at most {text.limit:.0%}); nor are {text.left_out_differing} of {text.left_out} that were "
        "forced or cut off, which do not count"
    ]
    if text.strayed:
        lines.append(f"self-check: {text.strayed} turns are not judged: the model sampled what no message says")
    lines += [f"rendering: {times} first turns differ: {reason}" for reason, times in rendering.otherwise.items()]
    if rendering.not_told:
        only = f"; of {rendering.told_count} it tells the number of tokens" if rendering.told_count else ""
        lines.append(f"rendering: the engine does not tell the ids of {rendering.not_told} first turns{only}")
    return "\n".join([table(["CHECK", "PASSED", "FAILED"], rows), *map(_wrapped, lines)])


def _failure(failure: Failure) -> str:
    where = (
        f"FAIL  {failure.check.value}, {failure.history}, conversation {failure.conversation}, cycle {failure.cycle}"
    )
    return f"{where}\n" + fill(failure.text, WIDTH, initial_indent="  ", subsequent_indent="    ")


def _wrapped(text: str, indent: int = 2) -> str:
    return fill(text, WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def verdict(result: VerifiedSessions) -> str:
    """The last line: PASS, FAIL or INCOMPLETE, and why."""
    found = result.found
    made = sum(found.passed.values()) + len(found.failures)
    reasons = list(_why(result))
    if result.ok:
        reasons.insert(0, f"{found.turns} turns, {made} checks, every needed event happened")
    elif found.failures:
        reasons.insert(0, f"{len(found.failures)} of {made} checks failed ({_by_check(found)})")
    return f"{found.verdict.value}: {'; '.join(reasons)}"


def _by_check(found: SessionVerification) -> str:
    return ", ".join(f"{len(failed)} {check.value}" for check in found.passed if (failed := found.failed(check)))


def _why(result: VerifiedSessions) -> Iterator[str]:
    """What keeps the verdict from PASS beside failed checks, or was let pass."""
    found = result.found
    if found.assistant_text.exceeded:
        text = found.assistant_text
        yield f"{text.share:.0%} of free turns differ in assistant text, at most {text.limit:.0%} may"
    if found.missing:
        names = [f"{event.name} ({event.history})" for event in found.missing]
        # what failed comes first, and mostly is why nothing else happened
        yield f"{len(names)} events did not happen" if found.failures else f"did not happen: {', '.join(names)}"
    if found.rendering.not_told:
        what = (
            "was not told" if found.rendering.unverified else "was not told (--allow-unverified-rendering passes that)"
        )
        yield f"the engine's own rendering {what}"
