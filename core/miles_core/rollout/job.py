"""One rollout to do: what it starts from, and the lines that it becomes."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from miles_core.errors import ConfigError
from miles_core.rollout.data import Prompt
from miles_core.rollout.output import Record, encode_line
from miles_core.types import Sample

NEEDS_CONTINUOUS = "only the continuous scheduler does that: set MILES_EXPERIMENTAL_ROLLOUT_REFACTOR=1"


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How many rollouts of each prompt, how many at once, how long one may take (seconds), and their seed.

    With `partial`, rollouts that are stopped keep their tokens for a later run. The run stops after
    `stop_after_failures` failures in a row that are all alike (see `alike`), and when no engine has answered for
    `engine_wait` seconds. `metrics_prompts` is how many prompts' rollouts are one step of `metrics.jsonl`.

    The rest needs `continuous`, the scheduler that finishes groups as they come: it stops when `keep_groups` are kept
    and aborts the others, and has at most `groups_at_once` under way.
    """

    samples_per_prompt: int = 1
    concurrency: int = 64
    sample_timeout: float | None = None
    seed: int | None = None
    partial: bool = False
    stop_after_failures: int | None = 32
    engine_wait: float = 300.0
    metrics_prompts: int = 32
    continuous: bool = False
    keep_groups: int | None = None
    groups_at_once: int | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for what the plain batch loop does not do."""
        for flag, value in (("--keep-groups", self.keep_groups), ("--groups-at-once", self.groups_at_once)):
            if value is not None and not self.continuous:
                raise ConfigError(f"{flag} {value}: {NEEDS_CONTINUOUS}")


@dataclass(frozen=True)
class Job:
    """One rollout to do."""

    prompt: Prompt
    sample_index: int

    @property
    def key(self) -> tuple[str, int, int]:
        """What tells whether it is finished: prompt hash, prompt index, sample index."""
        return self.prompt.hash, self.prompt.index, self.sample_index


def new_sample(job: Job, samples_per_prompt: int) -> Sample:
    """The sample a generate function starts from; its parts are its own to change."""
    prompt = job.prompt
    return Sample(
        group_index=prompt.index,
        index=prompt.index * samples_per_prompt + job.sample_index,
        prompt=copy.deepcopy(prompt.messages),
        label=copy.deepcopy(prompt.label),
        metadata=copy.deepcopy(prompt.metadata),
    )


def sample_seed(seed: int, job: Job) -> int:
    """The request seed of a rollout, 31 bits: the same on every machine, whatever runs beside it."""
    text = f"{seed}/{job.prompt.index}/{job.sample_index}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def encoded(
    finished: Sequence[tuple[Job, list[Sample], float]], *, together: bool = False
) -> tuple[list[Record], bytes]:
    """Finished rollouts as records and as lines; `together`, they are read again only if all of them are there."""
    records = [
        to_record(job, each, at, len(samples)) for job, samples, _ in finished for at, each in enumerate(samples)
    ]
    if together:
        records = [{**record, "group_lines": len(records)} for record in records]
    return records, b"".join(encode_line(record) for record in records)


def to_record(job: Job, sample: Sample, leaf_index: int, leaf_count: int) -> Record:
    """A line of `samples.jsonl`: the key, then every field of the sample."""
    key: Record = {
        "schema": 1,
        "prompt_hash": job.prompt.hash,
        "prompt_index": job.prompt.index,
        "sample_index": job.sample_index,
        "leaf_index": leaf_index,
        "leaf_count": leaf_count,
    }
    fields = sample.to_dict()
    for name in ("tokens", "loss_mask", "rollout_log_probs"):
        fields[name] = _listed(fields[name])
    return {**fields, **key}


def _listed(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value
