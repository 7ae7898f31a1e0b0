"""Finished samples as Parquet or safetensors files: what is written from `samples.jsonl` while a run goes on.

Lines of JSON are what a crash cannot spoil, so every sample is first such a line. Once there are enough of them, and
when the run ends, they become one file, `samples-00000.parquet` or `samples-00000.safetensors`, and the lines are
removed. Reading any of them gives the same records.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_core.errors import ConfigError, WireError

Record = dict[str, Any]

FORMATS = ("jsonl", "parquet", "safetensors")
"""What `--output-format` takes."""

# -- Parquet: a column for each field of a fixed type, JSON text for the others ----------------------------------

_INTS = (
    "schema", "prompt_index", "sample_index", "leaf_index", "leaf_count", "group_lines", "group_index", "index",
    "rollout_id", "response_length",
)  # fmt: skip
_TEXTS = ("prompt_hash", "response", "status", "adapter", "routing_key", "generate_function_path")
_LISTS: Mapping[str, type] = {
    "tokens": int,
    "loss_mask": int,
    "rollout_log_probs": float,
    "teacher_log_probs": float,
    "opd_reverse_kl": float,
    "weight_versions": str,
}
_JSON = (
    "prompt", "label", "metadata", "multimodal_inputs", "multimodal_train_inputs", "rollout_routed_experts",
    "rollout_indexer_topk", "train_metadata", "reward_spec", "spec_info", "prefix_cache_info",
)  # fmt: skip
REST = "rest"
"""The column with the rest of a record, as a JSON object: the names of its nulls, and values that fit no column, such
as rewards that are objects and a plugin's own keys."""


def _schema() -> Any:
    import pyarrow as pa

    numbers = {int: pa.int64(), float: pa.float64(), str: pa.string()}
    columns = [(name, pa.int64()) for name in _INTS] + [(name, pa.string()) for name in (*_TEXTS, *_JSON, REST)]
    columns += [(name, pa.list_(numbers[kind])) for name, kind in _LISTS.items()]
    columns += [("reward", pa.float64()), ("non_generation_time", pa.float64()), ("remove_sample", pa.bool_())]
    return pa.schema(columns)


def _fits(name: str, value: Any) -> bool:
    """Whether a column holds exactly this value."""
    if name in _INTS:
        return type(value) is int and abs(value) < 2**63
    if name in _TEXTS:
        return isinstance(value, str)
    if name in ("reward", "non_generation_time"):
        return type(value) is float
    if name == "remove_sample":
        return isinstance(value, bool)
    kind = _LISTS.get(name)
    return kind is not None and isinstance(value, list) and all(type(each) is kind for each in value)


def _row(record: Record) -> Record:
    row: Record = {}
    rest: Record = {}
    for name, value in record.items():
        if value is None:
            continue
        if name in _JSON:
            row[name] = json.dumps(value)
        elif _fits(name, value):
            row[name] = value
        else:
            rest[name] = value
    nulls = [name for name, value in record.items() if value is None]
    return {**row, REST: json.dumps({"nulls": nulls, "values": rest})}


def _record(row: Record) -> Record:
    found: Record = {
        name: json.loads(value) if name in _JSON else value
        for name, value in row.items()
        if value is not None and name != REST
    }
    rest = json.loads(row[REST])
    return {**found, **dict.fromkeys(rest["nulls"]), **rest["values"]}


def _write_parquet(records: Sequence[Record], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([_row(record) for record in records], schema=_schema()), path)


def _read_parquet(path: Path) -> Iterator[Record]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ConfigError(f"{path}: reading it needs pyarrow: pip install 'miles-plugins[data]'") from error
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                yield from map(_record, batch.to_pylist())
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise ConfigError(f"{path}: damaged: {error}; remove the file, or choose another folder") from error


# -- safetensors: the wire format of a session's samples, with all of a record's other fields in its JSON ---------


def _write_safetensors(records: Sequence[Record], path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    from miles_core.session import wire

    tensors: dict[str, Any] = {}
    rows: list[Record] = []
    for at, record in enumerate(records):
        row = dict(record)
        found = {name: _tensor(name, row.get(name)) for name in wire.TENSORS}
        for name, tensor in found.items():
            if tensor is not None:
                tensors[f"{name}.{at}"] = tensor
                del row[name]
        nulls = [name for name, tensor in found.items() if tensor is None]
        rows.append({**row, "nulls": nulls})
    meta: Record = {"samples": rows, "session_metadata": {}, "empty_reason": None}
    tensors[wire.META] = np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8)
    save_file(tensors, path)


def _tensor(name: str, value: Any) -> Any:
    """The array of a tensor field; None where there is none, or it is of another kind than a trainer takes."""
    from miles_core.session import wire

    value = array_of(value)
    if isinstance(value, (dict, str, bool, int, float)):
        return None
    try:
        tensor = wire.fitted(name, value, wire.TENSORS[name])
    except WireError:
        return None
    wanted = 3 if name in ("rollout_routed_experts", "rollout_indexer_topk") else 1
    return tensor if tensor is not None and tensor.ndim == wanted else None


def _read_safetensors(path: Path) -> Iterator[Record]:
    from safetensors import SafetensorError, safe_open

    from miles_core.session import wire

    try:
        with safe_open(path, framework="np") as file:
            meta = json.loads(file.get_tensor(wire.META).tobytes())
            names = set(file.keys())
            for at, row in enumerate(meta["samples"]):
                row.pop("nulls")
                for name in wire.TENSORS:
                    if f"{name}.{at}" in names:
                        tensor = file.get_tensor(f"{name}.{at}")
                        row[name] = text_of(tensor) if tensor.ndim == 3 else tensor.tolist()
                yield row
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ConfigError(f"{path}: damaged: {error}; remove the file, or choose another folder") from error


def text_of(array: Any) -> Record:
    """An array as JSON has it: dtype, shape, and base64 of the bytes in C order."""
    import numpy as np

    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")
    return {"dtype": array.dtype.name, "shape": list(array.shape), "base64": data}


def array_of(value: Any) -> Any:
    """The inverse of `text_of`; anything else as it is."""
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "base64"}:
        return value
    import numpy as np

    return np.frombuffer(base64.b64decode(value["base64"]), dtype=value["dtype"]).reshape(value["shape"])


# -- the files of a folder ---------------------------------------------------------------------------------------

_WRITE: Mapping[str, Callable[[Sequence[Record], Path], None]] = {
    "parquet": _write_parquet,
    "safetensors": _write_safetensors,
}
_READ: Mapping[str, Callable[[Path], Iterator[Record]]] = {
    "parquet": _read_parquet,
    "safetensors": _read_safetensors,
}


def check_format(name: str) -> None:
    """Raise ConfigError for a format that there is not, or that lacks its library."""
    if name not in FORMATS:
        raise ConfigError(f"--output-format {name}: expected {', '.join(FORMATS)}")
    if name == "parquet":
        try:
            import pyarrow.parquet  # noqa: F401  # only whether it is there
        except ImportError as error:
            raise ConfigError(f"--output-format {name} needs pyarrow: pip install 'miles-plugins[data]'") from error


def part_files(folder: Path) -> list[Path]:
    """The folder's files, in the order in which they were written."""
    found = [path for path in folder.glob("samples-*") if path.suffix.lstrip(".") in _READ]
    return sorted(found, key=lambda path: path.stem)


def read_part(path: Path) -> Iterator[Record]:
    """The records of one file. Raises ConfigError naming a damaged one."""
    return _READ[path.suffix.lstrip(".")](path)


def write_part(folder: Path, form: str, records: Sequence[Record]) -> Path:
    """Write the next file; it is whole and on disk when this returns."""
    files = part_files(folder)
    number = int(files[-1].stem.rpartition("-")[2]) + 1 if files else 0
    path = folder / f"samples-{number:05d}.{form}"
    new = path.with_name(path.name + ".new")
    _WRITE[form](records, new)
    with new.open("rb+") as file:
        os.fsync(file.fileno())
    new.replace(path)
    return path
