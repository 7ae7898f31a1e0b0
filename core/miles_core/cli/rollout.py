"""`miles-plugins rollout`: start what is needed, run an agent over prompts, write samples, sum up."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import click

from miles_core.cli.flags import HISTORIES
from miles_core.cli.plugin_flags import CommandWithPluginFlags
from miles_core.cli.rollout_plan import Flags
from miles_core.cli.rollout_run import run
from miles_core.rollout import compat
from miles_core.rollout.parts import FORMATS

_COUNT = click.IntRange(min=1)


def _options(command: Any) -> Any:
    """The options of the command, in the order of its help."""
    for option in reversed(_TASK + _REWARD + _MODEL + _SAMPLING + _RUN):
        command = option(command)
    return command


_TASK = [
    click.option(
        "--prompts",
        "--prompt-data",
        "prompts",
        type=click.Path(path_type=Path),
        required=True,
        help="Prompts: JSONL, Parquet, or the folder of a Hugging Face dataset.",
    ),
    click.option("--input-key", metavar="KEY", help="Where the prompt is; default: messages or prompt."),
    click.option("--label-key", metavar="KEY", help="Where the label is; default: label."),
    click.option("--metadata-key", metavar="KEY", help="Where the metadata is; default: metadata."),
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
    click.option(
        "--compat",
        type=click.Choice(["miles"]),
        help="Make miles' names importable where miles is not installed, for modules written for it.",
    ),
    click.option(
        "--samples-per-prompt",
        "--n-samples-per-prompt",
        "samples_per_prompt",
        type=_COUNT,
        default=1,
        show_default=True,
        help="Rollouts of each.",
    ),
    click.option("--limit", type=_COUNT, help="Only the first so many prompts."),
    click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder for the samples."),
    click.option(
        "--output-format",
        type=click.Choice(FORMATS),
        default="jsonl",
        show_default=True,
        help="How samples are kept: samples.jsonl, or Parquet or safetensors files that it becomes.",
    ),
    click.option("--overwrite", is_flag=True, help="Delete the samples of the folder and start anew."),
]

_REWARD = [
    click.option(
        "--reward-function",
        "--custom-rm-path",
        "reward_function",
        metavar="PATH",
        help="Dotted path of a function (args, sample) that gives the reward; without it the agent's counts.",
    ),
    click.option(
        "--group-reward",
        "--group-rm",
        "group_reward",
        is_flag=True,
        help="The reward function takes all samples of a prompt, and gives a list.",
    ),
    click.option("--reward-key", metavar="KEY", help="Which of several rewards counts, where they are an object."),
    click.option(
        "--dynamic-filter",
        "--dynamic-sampling-filter-path",
        "dynamic_filter",
        metavar="PLUGIN",
        help="Sample hook or dotted path that keeps a prompt's samples or leaves them out, such as rewards_differ.",
    ),
    click.option("--keep-groups", type=_COUNT, help="Stop when so many prompts' samples are kept; abort the rest."),
    click.option(
        "--groups-at-once",
        "--over-sampling-batch-size",
        "groups_at_once",
        type=_COUNT,
        help="Prompts under way at once; default: as many as --concurrency fills.",
    ),
]

_MODEL = [
    click.option("--tito-model", metavar="FAMILY", help="The model family, with @revision if need be, or auto."),
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
    click.option("--strict-template", is_flag=True, help="Refuse a checkpoint whose own template differs from ours."),
    click.option(
        "--apply-chat-template",
        is_flag=True,
        help="Give generate functions the prompt as text, as the family renders it; not with agentic.",
    ),
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
        "--pick-samples",
        "--session-sample-picker-path",
        "pick_samples",
        default="drop_retries",
        show_default=True,
        metavar="PLUGIN",
        help="Tree histories: which leaves become samples.",
    ),
    click.option(
        "--postprocess-samples",
        "--session-sample-postprocessor-path",
        "postprocess_samples",
        default="shared_prefix_mask",
        show_default=True,
        metavar="PLUGIN",
        help="Tree histories: what is done to the picked samples.",
    ),
    click.option(
        "--session-server-url", metavar="URL", help="Use this session server; starts no engine and no server."
    ),
    click.option("--api-key", envvar="MILES_API_KEY", help="Key of --session-server-url [MILES_API_KEY]."),
]

_SAMPLING = [
    click.option("--max-seq-len", type=_COUNT, help="Cut samples at so many tokens, prompt included."),
    click.option("--max-tokens", type=_COUNT, help="Most tokens of one turn."),
    click.option("--temperature", type=click.FloatRange(min=0), default=1.0, show_default=True, help="0: greedy."),
    click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True, help="1: all."),
    click.option("--top-k", type=click.IntRange(min=-1), default=-1, show_default=True, help="-1: all."),
    click.option("--seed", type=int, help="Derives one request seed per sample from this."),
]

_RUN = [
    click.option("--concurrency", type=_COUNT, default=64, show_default=True, help="Rollouts at once."),
    click.option(
        "--engine-concurrency",
        type=_COUNT,
        help="Requests to the engine at once, agents' turns or those of generate functions; default: no limit.",
    ),
    click.option(
        "--sample-timeout",
        type=click.FloatRange(min=0, min_open=True),
        default=3600.0,
        show_default=True,
        help="Seconds one rollout may take.",
    ),
    click.option(
        "--partial-rollout",
        is_flag=True,
        help="Keep what stopped rollouts have, and go on with it when the command is repeated.",
    ),
    click.option(
        "--stop-after-failures",
        type=click.IntRange(min=0),
        default=32,
        show_default=True,
        help="Stop when so many rollouts in a row failed with the same error; 0 never does.",
    ),
    click.option(
        "--engine-wait",
        type=click.FloatRange(min=0),
        default=300.0,
        show_default=True,
        help="Seconds to wait for an engine when none answers any more; then the run stops.",
    ),
    click.option(
        "--metrics-prompts",
        "--rollout-batch-size",
        "metrics_prompts",
        type=_COUNT,
        default=32,
        show_default=True,
        help="How many prompts' rollouts are one step, a line of metrics.jsonl.",
    ),
    click.option(
        "--pause-generation-mode",
        type=click.Choice(["abort", "retract", "in_place"]),
        help="How your trainer pauses the engine for new weights; abort is refused with sessions.",
    ),
    click.option(
        "--recompute-logprobs-via-prefill",
        is_flag=True,
        help="Your trainer scores samples again by a prefill; refused with tree histories.",
    ),
    click.option("--no-progress", is_flag=True, help="No progress bar."),
    click.option("--json", "as_json", is_flag=True, help="The summary as JSON on stdout."),
]


class _Rollout(CommandWithPluginFlags):
    plugin_options: ClassVar[Mapping[str, str]] = {"generate": "generator", "agent": "agent"}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options; with --compat also the flags of modules that import miles."""
        with compat.enabled() if self.words(ctx, "--compat") else nullcontext():
            super().format_options(ctx, formatter)

    def selector(self, ctx: click.Context, kind: str, name: str) -> str:
        """With --compat, a dotted default of miles is the built-in that it means."""
        return compat.selector(kind, name) if self.words(ctx, "--compat") else name


@click.command("rollout", cls=_Rollout, context_settings={"ignore_unknown_options": True})
@_options
@click.argument("extra", nargs=-1, type=click.UNPROCESSED, metavar="[FLAGS OF --generate AND --engine]...")
def command(extra: tuple[str, ...], **values: Any) -> None:
    """Run an agent over prompts and write samples.

    Every finished sample is one line of OUTPUT/samples.jsonl, on disk as soon as it is finished (--output-format
    may make other files of them). The same command, repeated, resumes an interrupted run and tries failed
    rollouts again.

    MILES_EXPERIMENTAL_ROLLOUT_REFACTOR=1 selects the continuous scheduler, which finishes prompts as they come:
    --dynamic-filter, --keep-groups and --groups-at-once need it.
    """
    click.get_current_context().exit(run(Flags(**values), extra))
