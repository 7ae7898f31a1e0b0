"""Rows of Parquet files, and of Hugging Face datasets that were saved to disk; needs pyarrow, and no more."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from miles_core.errors import ConfigError

Row = dict[str, Any]


def is_table(path: Path) -> bool:
    """Whether `--prompts` names a table rather than a file of JSON lines."""
    return path.is_dir() or path.suffix.lower() in (".parquet", ".arrow")


def read_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Every row, with the place it stands at. Raises ConfigError naming file and cause."""
    number = 0
    for file in _files(path):
        for batch in _batches(file):
            for row in batch.to_pylist():
                yield f"{path}, row {number}", _present(row)
                number += 1


def _present(value: Any) -> Any:
    """Without keys that are null: a column has the same keys in every row, wanted or not."""
    if isinstance(value, dict):
        return {key: _present(each) for key, each in value.items() if each is not None}
    return [_present(each) for each in value] if isinstance(value, list) else value


def _files(path: Path) -> Sequence[Path]:
    """The files of a dataset, in order."""
    if not path.is_dir():
        return [path]
    if (path / "dataset_dict.json").is_file():
        splits = _json(path / "dataset_dict.json").get("splits") or []
        if len(splits) != 1:
            raise ConfigError(
                f"--prompts {path}: has the splits {', '.join(splits)}; name one, such as {path / 'train'}"
            )
        return _files(path / splits[0])
    if (path / "state.json").is_file():
        state = _json(path / "state.json")
        if state.get("_indices_data_files"):
            raise ConfigError(f"--prompts {path}: its rows are reordered by an index; save it after flatten_indices()")
        return [path / entry["filename"] for entry in state.get("_data_files") or ()]
    found = sorted(path.glob("*.parquet")) or sorted(path.glob("data/*.parquet"))
    if not found:
        raise ConfigError(
            f"--prompts {path}: no dataset in this folder; expected state.json, as save_to_disk writes it, or *.parquet"
        )
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--prompts {path}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--prompts {path}: not an object; is this a dataset that save_to_disk wrote?")
    return found


def _batches(file: Path) -> Iterator[Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ConfigError(f"--prompts {file}: reading it needs pyarrow: pip install 'miles-plugins[data]'") from error
    try:
        if file.suffix.lower() == ".parquet":
            yield from pq.ParquetFile(file).iter_batches(batch_size=1024)
        else:
            with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as reader:
                yield from reader
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"--prompts {file}: cannot be read: {error}") from error
