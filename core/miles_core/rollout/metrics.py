"""What was measured in each step of a run: one line of `metrics.jsonl` for so many rollouts."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles_core.rollout.output import Record
from miles_core.rollout.summary import count_turns, reward_of

SCHEMA = 1


@dataclass
class _Step:
    """What one step has so far."""

    started: float
    rollouts: int = 0
    failures: int = 0
    aborted: int = 0
    left_out: int = 0
    rewards: list[float] = field(default_factory=list)
    groups: list[list[float]] = field(default_factory=list)
    groups_filtered: int = 0
    lengths: list[int] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    trained: int = 0
    tool_time: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    versions: Counter[str] = field(default_factory=Counter)


class Steps:
    """Adds up rollouts as they are over, and hands a line to `note` after `size` of them, and at the end.

    A rollout counts once in what is said of rewards and groups, however many leaves it has; lengths are of samples.
    """

    def __init__(
        self,
        size: int,
        note: Callable[[Mapping[str, Any]], None],
        *,
        first: int = 0,
        reward_key: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._size, self._note, self._number, self._key, self._clock = size, note, first, reward_key, clock
        self._step = _Step(clock())
        self._due: Counter[int] = Counter()
        self._rewards: dict[int, list[float]] = {}

    def expect(self, prompt_index: int) -> None:
        """One more rollout of this prompt is to come."""
        self._due[prompt_index] += 1

    def start(self) -> None:
        """The run begins now."""
        self._step = _Step(self._clock())

    def kept(self, records: Sequence[Record], seconds: Sequence[float]) -> None:
        """Samples that are kept, and how long each of their rollouts took."""
        step = self._step
        step.seconds += seconds
        for record in records:
            self._sample(record)
        for prompt_index in [record["prompt_index"] for record in records if record["leaf_index"] == 0]:
            self._over(prompt_index)
        self._end()

    def _sample(self, record: Record) -> None:
        step = self._step
        step.lengths.append(record["response_length"])
        step.totals.append(len(record["tokens"]))
        step.trained += sum(record["loss_mask"] or ())
        step.turns.append(count_turns(record))
        step.tool_time.append(record["non_generation_time"])
        step.statuses[record["status"]] += 1
        step.versions.update(set(record["weight_versions"]))
        reward = reward_of(record, self._key)
        if record["leaf_index"] == 0 and reward is not None:
            step.rewards.append(reward)
            self._rewards.setdefault(record["prompt_index"], []).append(reward)

    def failed(self, prompt_index: int) -> None:
        """A rollout gave nothing."""
        self._step.failures += 1
        self._over(prompt_index)
        self._end()

    def aborted(self, rollouts: int = 1) -> None:
        """Rollouts that were stopped; their groups are not over."""
        self._step.aborted += rollouts

    def group_left_out(self, prompt_index: int, rollouts: int) -> None:
        """A filter left a group out."""
        self._step.groups_filtered += 1
        self._step.left_out += rollouts
        self._step.rollouts += rollouts
        self._due.pop(prompt_index, None)
        self._end()

    def _over(self, prompt_index: int) -> None:
        """One rollout of this prompt; with the last one, the group is over."""
        self._step.rollouts += 1
        self._due[prompt_index] -= 1
        if self._due[prompt_index] <= 0 and (rewards := self._rewards.pop(prompt_index, None)):
            self._step.groups.append(rewards)

    def _end(self) -> None:
        if self._step.rollouts >= self._size:
            self.close()

    def close(self) -> None:
        """Note the step that is under way, if anything happened in it."""
        if self._step.rollouts or self._step.aborted:
            self._note(self._line())
            self._number += 1
        self._step = _Step(self._clock())

    def _line(self) -> dict[str, Any]:
        step = self._step
        seconds = max(self._clock() - step.started, 1e-9)
        samples = len(step.totals)
        return {
            "schema": SCHEMA,
            "step": self._number,
            "time": time.time(),
            "seconds": round(seconds, 3),
            "rollouts": step.rollouts,
            "samples": samples,
            "failures": step.failures,
            "aborted_rollouts": step.aborted,
            "filtered_rollouts": step.left_out,
            "filtered_groups": step.groups_filtered,
            "reward": spread(step.rewards),
            "groups": _groups(step.groups),
            "response_length": spread(step.lengths),
            "total_length": spread(step.totals),
            "turns": spread(step.turns),
            "statuses": dict(sorted(step.statuses.items())),
            "truncated_ratio": step.statuses["truncated"] / samples if samples else None,
            "aborted_ratio": step.statuses["aborted"] / samples if samples else None,
            "tokens": sum(step.totals),
            "response_tokens": sum(step.lengths),
            "trained_tokens": step.trained,
            "tokens_per_s": round(sum(step.totals) / seconds, 1),
            "response_tokens_per_s": round(sum(step.lengths) / seconds, 1),
            "rollouts_per_s": round(step.rollouts / seconds, 3),
            "rollout_seconds": spread(step.seconds),
            "tool_seconds": spread(step.tool_time),
            "weight_versions": dict(sorted(step.versions.items())),
        }


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Count, mean, standard deviation (of the population) and extremes."""
    if not values:
        return {"count": 0, "mean": None, "std": None, "min": None, "max": None}
    mean = math.fsum(values) / len(values)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    return {"count": len(values), "mean": mean, "std": deviation, "min": min(values), "max": max(values)}


def _groups(groups: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Of groups that are over: how far rewards differ inside, and how many teach nothing, all rewards being equal."""
    equal = [min(group) for group in groups if max(group) - min(group) <= 1e-6]
    deviations = [spread(group)["std"] for group in groups]
    return {
        "count": len(groups),
        "reward_std": spread(deviations)["mean"],
        "equal": len(equal),
        "all_zero": sum(abs(value) <= 1e-6 for value in equal),
    }
