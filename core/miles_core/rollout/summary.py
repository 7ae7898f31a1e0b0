"""Totals of a run: added up sample by sample, written as JSON, shown as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA = 1


@dataclass
class Spread:
    """Count, sum and extremes of a number."""

    count: int = 0
    total: float = 0.0
    low: float | None = None
    high: float | None = None

    def add(self, value: float) -> None:
        """Take one value in."""
        self.count += 1
        self.total += value
        self.low = value if self.low is None else min(self.low, value)
        self.high = value if self.high is None else max(self.high, value)

    @property
    def mean(self) -> float | None:
        """The average, or None without values."""
        return self.total / self.count if self.count else None

    def to_dict(self) -> dict[str, Any]:
        """As `summary.json` has it."""
        return {"count": self.count, "mean": self.mean, "min": self.low, "max": self.high}


@dataclass
class Tally:
    """Adds up records of `samples.jsonl`; `resumed` of the `samples` were there before this run."""

    samples: int = 0
    rollouts: int = 0
    resumed: int = 0
    failures: int = 0
    reward: Spread = field(default_factory=Spread)
    turns: Spread = field(default_factory=Spread)
    tokens: int = 0
    response_tokens: int = 0
    trained_tokens: int = 0
    tokens_before: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    mismatches: Counter[str] = field(default_factory=Counter)
    samples_with_mismatch: int = 0
    agent_errors: int = 0
    rolled_back: int = 0
    reward_key: str | None = None
    partial: int = 0
    """Of the aborted rollouts, those kept for a later run to go on with."""
    filtered_rollouts: int = 0
    not_begun: int = 0
    running: int = 0
    """Rollouts under way."""
    aborted: int = 0
    """Rollouts stopped because there was enough, or by an interrupt."""
    groups_kept: int = 0
    groups_filtered: int = 0

    def add(self, record: Mapping[str, Any], *, resumed: bool = False) -> None:
        """Take one sample in."""
        self.samples += 1
        self.rollouts += record["leaf_index"] == 0
        tokens = len(record["tokens"])
        self.tokens += tokens
        if resumed:
            self.resumed += 1
            self.tokens_before += tokens
        self.response_tokens += record["response_length"]
        self.trained_tokens += sum(record["loss_mask"] or ())
        self.statuses[record["status"]] += 1
        self.turns.add(count_turns(record))
        reward = reward_of(record, self.reward_key)
        if reward is not None and record["leaf_index"] == 0:  # a rollout counts once
            self.reward.add(reward)
        self._add_metadata(record["metadata"])

    def _add_metadata(self, metadata: Mapping[str, Any]) -> None:
        self.agent_errors += "agent_error" in metadata
        self.rolled_back += bool(metadata.get("diverged"))
        found = metadata.get("tito_session_mismatch") or []
        self.samples_with_mismatch += bool(found)
        self.mismatches.update(str(each.get("type")) for each in found if isinstance(each, Mapping))

    @property
    def share_trained(self) -> float | None:
        """The part of all tokens that the loss mask trains on."""
        return self.trained_tokens / self.tokens if self.tokens else None


def reward_of(record: Mapping[str, Any], key: str | None) -> float | None:
    """A record's reward as a number, of several the one named by `key`; None if there is none."""
    reward = record["reward"]
    if isinstance(reward, Mapping):
        reward = reward.get(key) if key else None
    return float(reward) if isinstance(reward, (int, float)) else None


def count_turns(record: Mapping[str, Any]) -> int:
    """Turns of a sample: as its lifecycle lists them, else one weight version each, else runs of sampled tokens."""
    if lifecycle := record["metadata"].get("lifecycle"):
        return len(lifecycle)
    if versions := record["weight_versions"]:
        return len(versions)
    mask = record["loss_mask"] or []
    return sum(1 for at, on in enumerate(mask) if on and (at == 0 or not mask[at - 1]))


def summarize(tally: Tally, *, wall_time: float, interrupted: bool = False) -> dict[str, Any]:
    """What `summary.json` holds; `wall_time` in seconds, rates are of this run alone."""
    seconds = max(wall_time, 1e-9)
    return {
        "schema": SCHEMA,
        "samples": tally.samples,
        "rollouts": tally.rollouts,
        "resumed_samples": tally.resumed,
        "failures": tally.failures,
        "aborted_rollouts": tally.aborted,
        "partial_rollouts": tally.partial,
        "rollouts_not_begun": tally.not_begun,
        "groups_kept": tally.groups_kept,
        "groups_filtered": tally.groups_filtered,
        "filtered_rollouts": tally.filtered_rollouts,
        "agent_errors": tally.agent_errors,
        "samples_with_lost_turns": tally.rolled_back,
        "reward": tally.reward.to_dict(),
        "turns": tally.turns.to_dict(),
        "tokens": tally.tokens,
        "response_tokens": tally.response_tokens,
        "trained_tokens": tally.trained_tokens,
        "share_trained": tally.share_trained,
        "statuses": dict(sorted(tally.statuses.items())),
        "mismatches": dict(sorted(tally.mismatches.items())),
        "samples_with_mismatch": tally.samples_with_mismatch,
        "wall_time_s": round(wall_time, 3),
        "samples_per_s": round((tally.samples - tally.resumed) / seconds, 3),
        "tokens_per_s": round((tally.tokens - tally.tokens_before) / seconds, 1),
        "interrupted": interrupted,
    }


def summary_table(summary: Mapping[str, Any]) -> Table:
    """The summary for people."""
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in _rows(summary):
        table.add_row(name, value)
    return table


def _rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    share = summary["share_trained"]
    trained = f"{summary['trained_tokens']:,}" + ("" if share is None else f" ({share:.1%} of all)")
    resumed = summary["resumed_samples"]
    return [
        ("samples", f"{summary['samples']:,}" + (f" ({resumed:,} from before)" if resumed else "")),
        ("reward", _spread(summary["reward"])),
        ("turns", _spread(summary["turns"])),
        ("tokens", f"{summary['tokens']:,}"),
        ("trained", trained),
        ("finish", _counts(summary["statuses"])),
        ("mismatches", _mismatches(summary["mismatches"])),
        *_group_rows(summary),
        ("failures", f"{summary['failures']:,}"),
        ("agent errors", f"{summary['agent_errors']:,}"),
        ("lost turns", _lost_turns(summary["samples_with_lost_turns"])),
        (
            "time",
            f"{summary['wall_time_s']:.1f} s, {summary['samples_per_s']:.2f} samples/s, "
            f"{summary['tokens_per_s']:,.0f} tokens/s",
        ),
    ]


def _group_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Only where something was left out or stopped."""
    kept, filtered, aborted = (summary[key] for key in ("groups_kept", "groups_filtered", "aborted_rollouts"))
    going_on = summary["partial_rollouts"]
    later = f", {going_on:,} of them to go on with" if going_on else ""
    groups = [("groups", f"{kept:,} kept, {filtered:,} left out by the filter")] if filtered else []
    left = summary["rollouts_not_begun"]
    rest = f"; {left:,} were not begun" if left else ""
    return groups + ([("aborted", f"{aborted:,} rollouts{later}{rest}")] if aborted or left else [])


def _lost_turns(samples: int) -> str:
    if not samples:
        return "none"
    return f"in {samples:,} samples: the agent did not replay its answers as they came (metadata: diverged)"


def _spread(value: Mapping[str, Any]) -> str:
    if not value["count"]:
        return "none"
    return f"mean {value['mean']:.3f}, min {value['min']:g}, max {value['max']:g}"


def _mismatches(value: Mapping[str, int]) -> str:
    harmless = " (assistant_text is harmless)" if "assistant_text" in value else ""
    return _counts(value) + harmless


def _counts(value: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in value.items()) or "none"
