"""Rollouts that a run was stopped in: what they have is kept, and a later run goes on from there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from miles_core.rollout.job import Job, to_record
from miles_core.rollout.output import Record, RunDirectory, encode_line, sample_of
from miles_core.types import Sample, SampleStatus

log = logging.getLogger(__name__)

Key = tuple[str, int, int]

_KEYS = ("schema", "prompt_hash", "prompt_index", "sample_index", "leaf_index", "leaf_count", "group_lines")
"""What a record has beside a sample's fields."""


def is_partial(samples: Sequence[Sample]) -> bool:
    """Whether this is one sample that was aborted with tokens to go on from."""
    return len(samples) == 1 and samples[0].status is SampleStatus.ABORTED and samples[0].response_length > 0


def has_nothing(samples: Sequence[Sample]) -> bool:
    """Whether a rollout was aborted before its first token."""
    return all(sample.status is SampleStatus.ABORTED and not sample.response_length for sample in samples)


class Partials:
    """What was kept, by rollout; a rollout that was over, and its group was not, is kept as it is.

    What an earlier run kept stays until its rollout is finished or fails: starting it changes nothing.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._records: dict[Key, list[Record]] = {}
        for record in directory.partials():
            self._records.setdefault(_key(record), []).append(record)

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, key: Key) -> bool:
        return key in self._records

    @property
    def prompts(self) -> set[tuple[str, int]]:
        """Hash and index of the prompts that have any."""
        return {key[:2] for key in self._records}

    def start(self, key: Key) -> list[Sample] | None:
        """The samples to go on from, each time new ones."""
        records = self._records.get(key)
        if records is None:
            return None
        return [sample_of({name: record[name] for name in record if name not in _KEYS}) for record in records]

    def keep(self, job: Job, samples: Sequence[Sample]) -> bool:
        """Keep what a rollout has; False, with a warning, where that cannot be written."""
        records = [to_record(job, sample, at, len(samples)) for at, sample in enumerate(samples)]
        try:
            lines = [encode_line(record) for record in records]
        except (TypeError, ValueError, RecursionError) as error:
            log.warning("prompt %d sample %d is not kept: %s", job.prompt.index, job.sample_index, error)
            return False
        self._records[job.key] = [_decoded(line) for line in lines]
        return True

    def drop(self, key: Key) -> None:
        """The rollout is finished, or of no use."""
        self._records.pop(key, None)

    def drop_where(self, is_over: Callable[[Key], bool]) -> None:
        """What a run without us has finished meanwhile, or what a crash left."""
        self._records = {key: records for key, records in self._records.items() if not is_over(key)}

    def write(self) -> None:
        """Put all of it on disk, in place of what was there."""
        self._directory.write_partials([record for records in self._records.values() for record in records])


def _key(record: Record) -> Key:
    return record["prompt_hash"], record["prompt_index"], record["sample_index"]


def _decoded(line: bytes) -> Any:
    import orjson

    return orjson.loads(line)
