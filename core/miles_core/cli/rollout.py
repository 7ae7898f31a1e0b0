"""`miles-plugins rollout`: start what is needed, run an agent over prompts, write samples, sum up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from miles_core.cli.flags import HISTORIES
from miles_core.cli.rollout_plan import Flags
from miles_core.cli.rollout_run import run

_COUNT = click.IntRange(min=1)


def _options(command: Any) -> Any:
    """The options of the command, in the order of its help."""
    for option in reversed(_TASK + _MODEL + _SAMPLING + _RUN):
        command = option(command)
    return command


_TASK = [
    click.option("--prompts", type=click.Path(path_type=Path), required=True, help="JSONL file of prompts."),
    click.option(
        "--agent",
        "--custom-agent-function-path",
        "agent",
        metavar="PLUGIN",
        help="The agent: a name, dist:name or dotted path.",
    ),
    click.option(
        "--generate",
        "--custom-generate-function-path",
        "generate",
        metavar="PLUGIN",
        default="agentic",
        show_default=True,
        help="The generate function: a name, dist:name or dotted path. Its own flags are accepted too.",
    ),
    click.option("--samples-per-prompt", type=_COUNT, default=1, show_default=True, help="Rollouts of each."),
    click.option("--limit", type=_COUNT, help="Only the first so many prompts."),
    click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder for the samples."),
    click.option("--overwrite", is_flag=True, help="Delete the samples of the folder and start anew."),
]

_MODEL = [
    click.option("--tito-model", metavar="FAMILY", help="The model family, with @revision if need be."),
    click.option(
        "--engine",
        "engines",
        metavar="NAME|URL",
        multiple=True,
        help="An engine to start, or the URL of one that runs (repeatable).",
    ),
    click.option("--model", help="Weights for an engine that is started; default: --checkpoint."),
    click.option("--checkpoint", "--hf-checkpoint", "checkpoint", help="Tokenizer's checkpoint; default: --model."),
    click.option("--chat-template-path", type=click.Path(path_type=Path), help="Template for --tito-model default."),
    click.option("--apply-chat-template-kwargs", metavar="JSON", help="Template settings, as a JSON object."),
    click.option(
        "--message-matcher",
        "--session-message-matcher",
        "message_matcher",
        default="strict",
        show_default=True,
        metavar="PLUGIN",
        help="When two messages are the same.",
    ),
    click.option(
        "--history",
        "--use-session-server",
        "history",
        type=click.Choice(list(HISTORIES)),
        default="linear",
        show_default=True,
        callback=lambda _context, _option, value: HISTORIES[value],
        help="How sessions grow; a tree gives one sample per leaf. v1 is linear, v2 is tree.",
    ),
    click.option(
        "--session-server-url", metavar="URL", help="Use this session server; starts no engine and no server."
    ),
    click.option("--api-key", envvar="MILES_API_KEY", help="Key of --session-server-url [MILES_API_KEY]."),
]

_SAMPLING = [
    click.option("--max-seq-len", type=_COUNT, help="Cut samples at so many tokens, prompt included."),
    click.option("--max-tokens", type=_COUNT, help="Most tokens of one turn."),
    click.option("--temperature", type=click.FloatRange(min=0), default=1.0, show_default=True),
    click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True),
    click.option("--top-k", type=click.IntRange(min=-1), default=-1, show_default=True, help="-1: all."),
    click.option("--seed", type=int, help="Derives one request seed per sample from this."),
]

_RUN = [
    click.option("--concurrency", type=_COUNT, default=64, show_default=True, help="Rollouts at once."),
    click.option(
        "--sample-timeout",
        type=click.FloatRange(min=0, min_open=True),
        default=3600.0,
        show_default=True,
        help="Seconds one rollout may take.",
    ),
    click.option("--no-progress", is_flag=True, help="No progress bar."),
    click.option("--json", "as_json", is_flag=True, help="The summary as JSON on stdout."),
]


@click.command("rollout", context_settings={"ignore_unknown_options": True})
@_options
@click.argument("extra", nargs=-1, type=click.UNPROCESSED, metavar="[FLAGS OF --generate]...")
def command(extra: tuple[str, ...], **values: Any) -> None:
    """Run an agent over prompts and write samples.

    Every finished sample is one line of OUTPUT/samples.jsonl, on disk as soon as it is finished. The same
    command, repeated, resumes an interrupted run and tries failed rollouts again.
    """
    click.get_current_context().exit(run(Flags(**values), extra))
