"""What `miles-plugins rollout` shows: a few lines at the start, a progress bar, the summary."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from miles_core.cli.output import write, write_json
from miles_core.rollout.summary import Tally, summary_table

if TYPE_CHECKING:
    from miles_core.cli.rollout_place import Place
    from miles_core.cli.rollout_plan import Plan


def say(text: str) -> None:
    """One message for people, on stderr."""
    write(text, sys.stderr)


def print_start(plan: Plan, place: Place, left: int) -> None:
    """What is about to run."""
    flags = plan.flags
    total = len(plan.prompts) * flags.samples_per_prompt
    done = f", {total - left} done before" if left < total else ""
    agent = plan.agent.describe() if plan.agent else "no agent"
    say(f"prompts  {flags.prompts}: {len(plan.prompts)} × {flags.samples_per_prompt} = {total} rollouts{done}")
    say(f"plugins  {agent}, {plan.generator.describe()}")
    say(f"model    {plan.model or 'as served'}, family {flags.tito_model or 'as served'}")
    say(f"engine   {place.text}")
    say(f"output   {flags.output}")


class Progress:
    """A progress bar with rates on stderr; silent where that is no terminal, or not wanted."""

    def __init__(self, total: int, *, shown: bool, before: int = 0) -> None:
        console = Console(stderr=True)
        self._bar = Bar(
            TextColumn("rollouts"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[rates]}"),
            console=console,
            disable=not shown or not console.is_terminal,
        )
        self._task = self._bar.add_task("rollouts", total=total, rates="")
        self._started = time.monotonic()
        self._before = before  # rollouts of an earlier run

    def update(self, tally: Tally) -> None:
        """Show the totals so far."""
        seconds = max(time.monotonic() - self._started, 1e-9)
        rates = [
            f"{(tally.rollouts - self._before) / seconds:.1f} rollouts/s",
            f"{(tally.tokens - tally.tokens_before) / seconds:,.0f} tokens/s",
            f"{tally.running} running",
        ]
        if tally.reward.mean is not None:
            rates.append(f"reward {tally.reward.mean:.3f}")
        if tally.failures:
            rates.append(f"{tally.failures} failed")
        if tally.groups_filtered:
            rates.append(f"{tally.groups_kept} groups kept, {tally.groups_filtered} left out")
        self._bar.update(self._task, advance=1, rates=" · ".join(rates))

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


def print_summary(summary: Mapping[str, Any], stdout: TextIO, *, as_json: bool) -> None:
    """The summary on stdout."""
    if as_json:
        write_json(summary, stdout)
    else:
        Console(file=stdout, highlight=False).print(summary_table(summary))
