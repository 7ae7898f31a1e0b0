"""`miles-plugins inspect`: one sample of a rollout's output, turn by turn, in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from miles_core.cli.output import claim_stdout, write_json
from miles_core.errors import ConfigError, MilesError
from miles_core.rollout.output import SAMPLES, Record, read_records, read_run

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

TRAINED, PROMPT = "bold green", "dim"


@dataclass(frozen=True)
class Span:
    """Neighbouring tokens that are all trained on, or all not; `start` counts from the sample's first token."""

    trained: bool
    start: int
    ids: Sequence[int]
    log_probs: Sequence[float]

    @property
    def range(self) -> str:
        """`tokens 3 to 17`."""
        return f"tokens {self.start} to {self.start + len(self.ids) - 1}"


@dataclass
class Reader:
    """What turns ids into text and messages: the run's tokenizer and family, as far as they can be had."""

    text: Callable[[Sequence[int]], str] | None = None
    message: Callable[[Sequence[int]], Mapping[str, Any]] | None = None
    missing: list[str] = field(default_factory=list)
    """Why something cannot be shown."""


@click.command("inspect")
@click.argument("directory", type=click.Path(path_type=Path), metavar="DIR")
@click.argument("number", type=click.IntRange(min=0), default=0, metavar="[N]")
@click.option("--tokens", "each_token", is_flag=True, help="A table of every token of the response.")
@click.option("--checkpoint", "--hf-checkpoint", "checkpoint", help="Where the tokenizer is now.")
@click.option("--json", "as_json", is_flag=True, help="The sample as JSON.")
def command(directory: Path, number: int, each_token: bool, checkpoint: str | None, as_json: bool) -> None:
    """Show sample N (from 0) of a rollout's output DIR: its turns, tool calls, tokens, log-probs and reward.

    Tokens that are trained on are green, the others dim.
    """
    from rich.console import Console

    stdout = claim_stdout()
    run = read_run(directory)
    record, count = find_record(directory, number)
    if as_json:
        write_json(record, stdout)
        return
    reader = open_reader(run, checkpoint)
    console = Console(file=stdout, highlight=False, soft_wrap=True)
    show_head(console, record, f"sample {number} of {count} in {directory}")
    show_turns(console, record, reader)
    if each_token:
        console.print(token_table(record, reader))
    for reason in reader.missing:
        click.echo(reason, err=True)


def find_record(directory: Path, number: int) -> tuple[Record, int]:
    """Sample `number`, and how many there are."""
    try:
        found, count = None, 0
        for count, record in enumerate(read_records(directory), 1):
            if count == number + 1:
                found = record
    except OSError as error:
        raise ConfigError(f"{directory / SAMPLES}: {error.strerror}") from error
    if found is None:
        have = f"samples 0 to {count - 1}" if count else "no samples yet"
        raise ConfigError(f"no sample {number} in {directory}; it has {have}")
    return found, count


def spans(record: Mapping[str, Any]) -> Iterator[Span]:
    """The sample's tokens cut where the loss mask changes; the prompt first."""
    tokens, mask = record["tokens"], record["loss_mask"] or []
    offset = len(tokens) - len(mask)
    flags = [False] * offset + [bool(on) for on in mask]
    log_probs = [0.0] * offset + list(record["rollout_log_probs"] or [0.0] * len(mask))
    start = 0
    for at in range(1, len(flags) + 1):
        if at == len(flags) or flags[at] != flags[start]:
            yield Span(flags[start], start, tokens[start:at], log_probs[start:at])
            start = at


def open_reader(run: Mapping[str, Any], checkpoint: str | None) -> Reader:
    """The run's tokenizer and family; whatever fails is noted, and ids are shown instead."""
    settings = run["settings"]
    place = checkpoint or settings.get("checkpoint")
    if not place:
        return Reader(missing=["ids only: the run has no checkpoint noted; give --checkpoint"])
    from miles_core.tito import load_tokenizer

    try:
        tokenizer = load_tokenizer(place)
    except MilesError as error:
        return Reader(missing=[f"ids only: {error}; give --checkpoint"])
    reader = Reader(text=tokenizer.decode)
    try:
        reader.message = _parser(settings.get("tito_model"), tokenizer, place)
    except MilesError as error:
        reader.missing.append(f"tool calls are not parsed: {error}")
    return reader


def _parser(selector: str | None, tokenizer: Any, checkpoint: str) -> Callable[[Sequence[int]], Mapping[str, Any]]:
    from miles_core.plugins import Registry
    from miles_core.plugins.families import family_of, resolve

    if not selector:
        raise ConfigError("the run has no model family noted")
    registry = Registry.discover()
    plugin = registry.load("family", resolve(registry, selector, checkpoint))
    family = family_of(plugin).bind(tokenizer, plugin.revision)
    parse: Callable[[Sequence[int]], Mapping[str, Any]] = family.parse
    return parse


# -- the view ------------------------------------------------------------------------------------------------


def show_head(console: Console, record: Mapping[str, Any], title: str) -> None:
    """Where the sample comes from and how it ended."""
    trained, total = sum(record["loss_mask"] or ()), len(record["tokens"])
    share = f", {trained / total:.1%}" if total else ""
    mismatch = record["metadata"].get("tito_session_mismatch")
    kinds = "not checked" if mismatch is None else ", ".join(str(m.get("type")) for m in mismatch) or "none"
    lines = [
        ("prompt", f"{record['prompt_index']}, sample {record['sample_index']}, leaf {record['leaf_index']}"),
        ("status", str(record["status"])),
        ("reward", f"{record['reward']}, label {record['label']}"),
        ("tokens", f"{total}, {record['response_length']} of the response, {trained} trained{share}"),
        ("mismatch", kinds),
    ]
    if error := record["metadata"].get("agent_error"):
        lines.append(("agent", f"failed: {error}"))
    console.print(title, style="bold", markup=False)
    for name, value in lines:
        console.print(f"{name:<9} {value}", markup=False)


def show_turns(console: Console, record: Mapping[str, Any], reader: Reader) -> None:
    """Every span: what went in, and what was sampled with its tool calls and log-probs."""
    turn = 0
    for span in spans(record):
        if span.trained:
            turn += 1
        head = f"turn {turn}, sampled" if span.trained else "prompt" if turn == 0 else "appended"
        console.print(f"\n{head}: {span.range}{_log_prob_note(span)}", style="bold", markup=False)
        console.print(_coloured(span, reader))
        if span.trained:
            for line in _calls(span, reader):
                console.print(f"  {line}", style="cyan", markup=False)


def _log_prob_note(span: Span) -> str:
    if not span.trained:
        return ""
    mean = sum(span.log_probs) / len(span.log_probs)
    return f", log-prob mean {mean:.3f}, lowest {min(span.log_probs):.3f}"


def _coloured(span: Span, reader: Reader) -> Text:
    from rich.text import Text

    text = reader.text(span.ids) if reader.text else " ".join(map(str, span.ids))
    return Text(_printable(text), style=TRAINED if span.trained else PROMPT)


def _printable(text: str) -> str:
    """The text with control characters spelled out: a sample must not drive the terminal."""
    return "".join(char if char == "\n" or char.isprintable() else repr(char)[1:-1] for char in text)


def _calls(span: Span, reader: Reader) -> list[str]:
    if reader.message is None:
        return []
    functions = [call.get("function") or {} for call in reader.message(span.ids).get("tool_calls") or ()]
    return [_printable(f"tool call {each.get('name')} {each.get('arguments')}") for each in functions]


def token_table(record: Mapping[str, Any], reader: Reader) -> Table:
    """One row per token of the response."""
    from rich.table import Table
    from rich.text import Text

    table = Table("index", "id", "text", "trained", "log-prob", box=None, title_justify="left")
    offset = len(record["tokens"]) - record["response_length"]
    for span in spans(record):
        for at, (token, log_prob) in enumerate(zip(span.ids, span.log_probs, strict=True), span.start):
            if at < offset:
                continue
            text = Text(repr(reader.text([token])) if reader.text else "", style=TRAINED if span.trained else PROMPT)
            number = f"{log_prob:.4f}" if span.trained else ""
            table.add_row(str(at), str(token), text, "yes" if span.trained else "no", number)
    return table
