"""The folder of one run: durable appends, and what an interrupted run left to continue from.

`samples.jsonl` has one line per finished sample, `failures.jsonl` one per failed attempt, `filtered.jsonl` one per
group that a filter left out, `partial.jsonl` one per rollout that a run was stopped in, `metrics.jsonl` one per step,
`run.json` the settings that make samples comparable, `summary.json` the totals. Samples are on disk when `append`
returns. With another format than JSON lines, `parts` says what becomes of `samples.jsonl`.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import orjson

from miles_core.errors import ConfigError
from miles_core.rollout.parts import array_of, check_format, part_files, read_part, text_of, write_part
from miles_core.types import Sample

SCHEMA = 1
RUN, SAMPLES, FAILURES, SUMMARY = "run.json", "samples.jsonl", "failures.jsonl", "summary.json"
FILTERED, PARTIAL, METRICS = "filtered.jsonl", "partial.jsonl", "metrics.jsonl"

PART_BYTES = 64 * 2**20
"""With another format than JSON lines: so many bytes of lines become a file."""

DISK_TROUBLE = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS, errno.EIO)
"""What a full or failing disk answers."""


Record = dict[str, Any]
"""One line of `samples.jsonl`, decoded."""


class RunDirectory:
    """An open output folder; only one process may have it open.

    `settings` are compared with those of the run that is continued; `facts` are noted beside them. `output_format` is
    how samples are kept, see `parts`; a run may go on in another one.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        *,
        facts: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        output_format: str = "jsonl",
    ) -> None:
        check_format(output_format)
        self.path, self.output_format = path, output_format
        self._pending: list[bytes] = []
        self._is_ours = False
        self._lock = asyncio.Lock()
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="samples")
        self._samples = _open_locked(path)
        try:
            if overwrite:
                self._samples.truncate(0)
                for name in (RUN, FAILURES, FILTERED, SUMMARY, PARTIAL, METRICS):
                    (path / name).unlink(missing_ok=True)
                for part in part_files(path):
                    part.unlink()
            _check_settings(path, settings, empty=self._samples.seek(0, os.SEEK_END) == 0 and not part_files(path))
            write_json(path / RUN, {"schema": SCHEMA, "settings": dict(settings), **(facts or {})})
            self.torn = cut_torn_tail(self._samples)
            self._drop_converted()
            self._is_ours = True
        except BaseException:
            self.close()
            raise

    def records(self) -> Iterator[Record]:
        """The finished samples found on disk, one at a time."""
        return read_records(self.path)

    async def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Add the samples of one rollout; returns when they are on disk, together with what others added."""
        self.add_lines(b"".join(encode_line(record) for record in records))
        await self.flush()

    def add_lines(self, lines: bytes) -> None:
        """Lines that `encode_line` made, for the next `flush`; without one they are written when the folder closes."""
        self._pending.append(lines)

    async def flush(self) -> None:
        """Write what was added; returns when it is on disk."""
        async with self._lock:
            batch = b"".join(self._pending)
            self._pending.clear()
            if batch:
                await asyncio.get_running_loop().run_in_executor(self._disk, self._write, batch)

    def note_failure(self, failure: Mapping[str, Any]) -> None:
        """Add a line about a rollout that failed; a resumed run tries it again."""
        with (self.path / FAILURES).open("ab") as file:
            file.write(json.dumps(failure).encode() + b"\n")

    def note_filtered(self, note: Mapping[str, Any]) -> None:
        """Add a line about a group that the filter left out; a resumed run does not try it again."""
        with (self.path / FILTERED).open("ab") as file:
            file.write(json.dumps(note).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def filtered(self) -> Iterator[dict[str, Any]]:
        """The notes about groups that were left out; a last line that was not finished counts for nothing."""
        try:
            lines = (self.path / FILTERED).read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return
        yield from (orjson.loads(line) for line in lines if line.endswith(b"\n"))

    def partials(self) -> Iterator[Record]:
        """The rollouts that an earlier run was stopped in, as far as they came."""
        if (self.path / PARTIAL).exists():
            yield from _lines(self.path / PARTIAL)

    def write_partials(self, records: Sequence[Record]) -> None:
        """Replace them; without any, there is no file."""
        if records:
            _replace(self.path / PARTIAL, b"".join(map(encode_line, records)))
        else:
            (self.path / PARTIAL).unlink(missing_ok=True)

    def note_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Add the line of one step."""
        with (self.path / METRICS).open("ab") as file:
            file.write(json.dumps(metrics, allow_nan=False).encode() + b"\n")

    def steps(self) -> int:
        """How many steps earlier runs have noted."""
        try:
            return (self.path / METRICS).read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace `summary.json`."""
        write_json(self.path / SUMMARY, summary)

    def close(self) -> None:
        """Wait for writes under way, and let go of the folder; may be called twice."""
        self._disk.shutdown(wait=True)
        if not self._samples.closed:
            if self._pending:
                self._write(b"".join(self._pending))
                self._pending.clear()
            try:
                self._convert()
            finally:
                self._samples.close()

    def _write(self, data: bytes) -> None:
        self._samples.write(data)
        self._samples.flush()
        os.fsync(self._samples.fileno())
        if self._samples.tell() >= PART_BYTES:
            self._convert()

    def _convert(self) -> None:
        """With another format than JSON lines: the lines so far become one file."""
        if self.output_format == "jsonl" or not self._is_ours or not self._samples.seek(0, os.SEEK_END):
            return
        records = list(_lines(self.path / SAMPLES))
        write_part(self.path, self.output_format, records)
        self._samples.truncate(0)
        os.fsync(self._samples.fileno())

    def _drop_converted(self) -> None:
        """A crash may have left lines behind that had just become a file."""
        parts = part_files(self.path)
        if not parts or not self._samples.seek(0, os.SEEK_END):
            return
        first, written = next(_lines(self.path / SAMPLES)), next(read_part(parts[-1]))
        if all(first[key] == written[key] for key in ("prompt_hash", "prompt_index", "sample_index")):
            self._samples.truncate(0)


def read_records(path: Path) -> Iterator[Record]:
    """Every finished sample of the folder, whatever its format; a damaged line or file is an error that names it."""
    for part in part_files(path):
        yield from read_part(part)
    yield from _lines(path / SAMPLES)


def _lines(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            record = _parse(line)
            if record is None:
                raise ConfigError(f"{path}:{number}: damaged: not a sample; remove the line, or choose another folder")
            yield record


def read_samples(path: Path) -> Iterator[Sample]:
    """Every finished sample of the folder, as the generate function left it; keys beside its fields are attributes."""
    for record in read_records(path):
        yield sample_of(record)


def sample_of(record: Record) -> Sample:
    """The sample of one record."""
    return Sample.from_dict({key: array_of(value) for key, value in record.items()})


def read_run(path: Path) -> dict[str, Any]:
    """`run.json` of the folder, or an error that says what is wrong with the folder."""
    try:
        run = orjson.loads((path / RUN).read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: no output of a rollout: {RUN}: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path / RUN}: damaged: {error}") from error
    if not isinstance(run, dict) or run.get("schema") != SCHEMA:
        raise ConfigError(f"{path / RUN}: not of schema {SCHEMA}, which this version reads")
    return run


def encode_line(record: Mapping[str, Any]) -> bytes:
    """One JSON line. NaN and infinity are a ValueError, values that JSON lacks a TypeError, naming the field."""
    try:
        return json.dumps(record, allow_nan=False, default=_plain, separators=(",", ":")).encode() + b"\n"
    except (ValueError, TypeError) as error:
        raise type(error)(f"field {_culprit(record)!r} cannot be written as JSON: {error}") from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace the file as a whole: readers see the old text or the new one."""
    _replace(path, json.dumps(value, indent=2, allow_nan=False, default=str).encode() + b"\n")


def _replace(path: Path, data: bytes) -> None:
    new = path.with_name(path.name + ".new")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def cut_torn_tail(file: IO[bytes]) -> int:
    """Cut off what a crash left unfinished at the end; returns how many bytes.

    That is a line without its end, and the lines of a rollout, or of a group, whose other samples are missing.
    """
    file.seek(0)
    whole = group_start = expected = seen = 0
    for line in file:
        record = _parse(line)
        if record is None:
            if file.read(1):  # more lines follow: damage, not a torn end; `read_records` names it
                return 0
            break
        if seen >= expected:
            group_start, expected, seen = whole, int(record.get("group_lines") or record["leaf_count"]), 0
        seen += 1
        whole += len(line)
    keep = group_start if seen < expected else whole
    size = file.seek(0, os.SEEK_END)
    if keep < size:
        file.truncate(keep)
    file.seek(0, os.SEEK_END)
    return size - keep


def _parse(line: bytes) -> Record | None:
    if not line.endswith(b"\n"):
        return None
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("leaf_count"), int) else None


def _open_locked(path: Path) -> IO[bytes]:
    try:
        path.mkdir(parents=True, exist_ok=True)
        _refuse_foreign(path)
        file = (path / SAMPLES).open("a+b")
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot be written: {error.strerror or error}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ConfigError(f"--output {path}: another process is writing to it; choose another folder") from error
    return file


def _refuse_foreign(path: Path) -> None:
    """A folder that holds things, and none of a rollout, was probably named by mistake."""
    found = sorted(each.name for each in path.iterdir())
    if found and not {RUN, SAMPLES} & set(found):
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise ConfigError(
            f"--output {path}: is not empty, and holds no rollout (there is {', '.join(found[:3])}{more}); "
            "choose a new or an empty folder"
        )


def _check_settings(path: Path, settings: Mapping[str, Any], *, empty: bool) -> None:
    if not (path / RUN).exists():
        if empty:
            return
        raise ConfigError(
            f"--output {path}: has {SAMPLES} without {RUN}; give --overwrite to start anew, or another --output"
        )
    before = read_run(path)["settings"]
    now = json.loads(json.dumps(settings))
    changed = [
        f"{key} was {_short(before.get(key))}, now {_short(now.get(key))}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    if changed and not empty:
        raise ConfigError(
            f"--output {path}: has samples of another run ({'; '.join(changed)})\n"
            "  repeat its settings to resume it, give --overwrite to start anew, or another --output"
        )


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _plain(value: Any) -> Any:
    """numpy's scalars as numbers, and arrays as dtype, shape and base64 of the bytes in C order."""
    import numpy as np

    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype != object:
        return text_of(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _culprit(record: Mapping[str, Any]) -> str:
    for key, value in record.items():
        try:
            json.dumps(value, allow_nan=False, default=_plain)
        except (ValueError, TypeError):
            return key
    return "?"
