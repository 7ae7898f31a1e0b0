"""The samples payload: a safetensors file with one JSON tensor, written strictly and read strictly."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import orjson
from safetensors import SafetensorError
from safetensors.numpy import load

from miles_core.errors import WireError
from miles_core.types import PrefixCacheInfo, Sample, SampleStatus, SpecInfo

if TYPE_CHECKING:
    from miles_core.session.assemble import AssembledSample

Counters = TypeVar("Counters", PrefixCacheInfo, SpecInfo)

META = "_samples_meta"
TENSORS: Mapping[str, Any] = {
    "tokens": np.int64,
    "loss_mask": np.uint8,
    "rollout_log_probs": np.float64,
    "rollout_routed_experts": np.int32,
    "rollout_indexer_topk": np.int32,
}
DTYPES = {"int64": "I64", "uint8": "U8", "float64": "F64", "int32": "I32"}
"""What safetensors calls them."""
JSON_FIELDS = (
    "response",
    "response_length",
    "status",
    "weight_versions",
    "prefix_cache_info",
    "spec_info",
    "metadata",
)
KINDS: Mapping[str, type] = {
    "response": str,
    "response_length": int,
    "status": str,
    "weight_versions": list,
    "prefix_cache_info": dict,
    "spec_info": dict,
    "metadata": dict,
}
"""The Python type of each JSON field."""


def encode(
    samples: Sequence[AssembledSample],
    session_metadata: Mapping[str, Any],
    *,
    empty_reason: str | None = None,
) -> bytes:
    """The payload of `POST /sessions/{id}/samples`. Raises WireError for values that do not fit."""
    return b"".join(encode_parts(samples, session_metadata, empty_reason=empty_reason))


def encode_parts(
    samples: Sequence[AssembledSample],
    session_metadata: Mapping[str, Any],
    *,
    empty_reason: str | None = None,
) -> list[bytes | memoryview]:
    """The payload in parts, the samples' arrays being their own memory: nothing large is copied."""
    tensors: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for index, sample in enumerate(samples):
        found = {name: fitted(name, getattr(sample, name), dtype) for name, dtype in TENSORS.items()}
        tensors.update({f"{name}.{index}": value for name, value in found.items() if value is not None})
        rows.append({**_json_row(sample), "nulls": [name for name, value in found.items() if value is None]})
    meta = {"samples": rows, "session_metadata": dict(session_metadata), "empty_reason": empty_reason}
    tensors[META] = np.frombuffer(_dumped(meta), dtype=np.uint8)
    return _safetensors(tensors)


def _safetensors(tensors: Mapping[str, Any]) -> list[bytes | memoryview]:
    """A safetensors file: the length of a JSON header, the header, then every tensor's memory, aligned to 8 bytes."""
    header: dict[str, Any] = {}
    parts: list[bytes | memoryview] = []
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        end = at + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype.name], "shape": tensor.shape, "data_offsets": (at, end)}
        parts.append(memoryview(tensor.reshape(-1)).cast("B") if tensor.size else b"")
        at = end
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *parts]


def check_row(sample: AssembledSample) -> None:
    """Raise WireError unless the sample's JSON fields have their types and fit into JSON."""
    for name, kind in KINDS.items():
        value = getattr(sample, name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise WireError(f"{name} is {type(value).__name__}, expected {kind.__name__}")
    if not all(isinstance(version, str) for version in sample.weight_versions):
        raise WireError(f"weight_versions are {sample.weight_versions!r}, expected strings")
    row = _json_row(sample)
    if not _is_finite(row):
        raise WireError("metadata, reward or counters hold NaN or Infinity, which JSON has not")
    _dumped(row)


def _json_row(sample: AssembledSample) -> dict[str, Any]:
    row = {name: getattr(sample, name) for name in JSON_FIELDS}
    return {**row, "reward": sample.reward} if sample.has_reward else row


def _is_finite(value: Any) -> bool:
    """Whether no number inside is NaN or infinite: orjson would write null for it."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, float) and not math.isfinite(one):
            return False
        if isinstance(one, (dict, list, tuple)):
            waiting.extend(one.values() if isinstance(one, dict) else one)
    return True


def _dumped(meta: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(meta, option=orjson.OPT_SERIALIZE_NUMPY)
    except (TypeError, ValueError) as error:
        raise WireError(f"the samples' metadata does not fit into JSON: {error}") from error


def fitted(name: str, value: Any, dtype: Any) -> Any:
    """A tensor field as an array of its dtype; None stays None. Raises WireError for values that do not fit."""
    if value is None:
        return None
    text = f"{name}: values do not fit {np.dtype(dtype).name}"
    try:
        given = np.asarray(value)
        if given.size == 0 or np.can_cast(given.dtype, dtype, "safe"):
            return np.ascontiguousarray(given, dtype=dtype)
        if given.dtype.kind not in "biuf":
            raise WireError(f"{text} ({given.dtype})")
        with np.errstate(invalid="ignore"):
            converted = given.astype(dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"{text}: {error}") from error
    if not np.array_equal(converted, given):
        raise WireError(f"{text} ({given.dtype})")
    return np.ascontiguousarray(converted)


@dataclass(frozen=True)
class SamplesReply:
    """A decoded payload: per sample its fields (arrays for tensor fields, None where null)."""

    samples: list[dict[str, Any]]
    session_metadata: dict[str, Any]
    empty_reason: str | None


def decode(payload: bytes) -> SamplesReply:
    """Read a samples payload. Raises WireError for unknown tensors, wrong dtypes and missing meta."""
    try:
        tensors = load(payload)
    except (SafetensorError, ValueError, KeyError) as error:
        raise WireError(f"the samples payload is not a safetensors file: {error}") from error
    meta = _read_meta(tensors.pop(META, None))
    rows = [_read_sample(index, row, tensors) for index, row in enumerate(meta["samples"])]
    if tensors:
        raise WireError(f"the samples payload has unknown tensors: {', '.join(sorted(tensors))}")
    return SamplesReply(rows, meta["session_metadata"], meta["empty_reason"])


def _read_meta(tensor: Any) -> dict[str, Any]:
    if tensor is None:
        raise WireError(f"the samples payload has no tensor {META}")
    if tensor.dtype != np.uint8 or tensor.ndim != 1:
        raise WireError(f"{META} is {tensor.dtype} with {tensor.ndim} dimensions, expected uint8 with one")
    try:
        meta = orjson.loads(tensor.tobytes())
    except orjson.JSONDecodeError as error:
        raise WireError(f"{META} is not JSON: {error}") from error
    if not isinstance(meta, dict) or not isinstance(meta.get("samples"), list):
        raise WireError(f"{META} has no list of samples")
    if not isinstance(meta.get("session_metadata"), dict) or "empty_reason" not in meta:
        raise WireError(f"{META} lacks session_metadata or empty_reason")
    if meta["empty_reason"] is not None and not isinstance(meta["empty_reason"], str):
        raise WireError(f"{META}: empty_reason is {meta['empty_reason']!r}, expected text or null")
    return meta


def _read_sample(index: int, row: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    missing = [name for name in (*JSON_FIELDS, "nulls") if not isinstance(row, dict) or name not in row]
    if missing:
        raise WireError(f"sample {index} lacks {', '.join(missing)}")
    if not isinstance(row["nulls"], list):
        raise WireError(f"sample {index}: nulls is {row['nulls']!r}, expected a list of names")
    unknown = [name for name in row["nulls"] if name not in tuple(TENSORS)]
    if unknown:
        raise WireError(f"sample {index} names unknown nulls: {', '.join(map(repr, unknown))}")
    _check_fields(index, row)
    out = {name: value for name, value in row.items() if name != "nulls"}
    for name, dtype in TENSORS.items():
        tensor = tensors.pop(f"{name}.{index}", None)
        if (tensor is None) != (name in row["nulls"]):
            raise WireError(f"sample {index}: {name} is {'missing' if tensor is None else 'there although it is null'}")
        if tensor is not None and tensor.dtype != dtype:
            raise WireError(f"sample {index}: {name} is {tensor.dtype}, expected {np.dtype(dtype).name}")
        out[name] = tensor
    _check_shapes(index, out)
    return out


def _check_fields(index: int, row: Mapping[str, Any]) -> None:
    for name, kind in KINDS.items():
        if not isinstance(row[name], kind) or isinstance(row[name], bool):
            raise WireError(f"sample {index}: {name} is {type(row[name]).__name__}, expected {kind.__name__}")
    if row["status"] not in set(SampleStatus):
        raise WireError(f"sample {index}: status {row['status']!r} is none of {', '.join(SampleStatus)}")


def _check_shapes(index: int, sample: Mapping[str, Any]) -> None:
    """Lengths agree wherever the tensors are there."""
    tokens, length = sample["tokens"], sample["response_length"]
    rows = None if tokens is None else max(len(tokens) - 1, 0) if tokens.ndim else 0
    wanted: Mapping[str, tuple[int, int | None]] = {
        "tokens": (1, None),
        "loss_mask": (1, length),
        "rollout_log_probs": (1, length),
        "rollout_routed_experts": (3, rows),
        "rollout_indexer_topk": (3, rows),
    }
    for name, (dimensions, count) in wanted.items():
        tensor = sample[name]
        if tensor is not None and (tensor.ndim != dimensions or count not in (None, len(tensor))):
            raise WireError(
                f"sample {index}: {name} has the shape {tensor.shape}, with {length} response tokens of "
                f"{None if tokens is None else tokens.size}"
            )
    if length < 0 or (tokens is not None and length > len(tokens)):
        raise WireError(f"sample {index}: response_length is {length}, outside its tokens")


def apply(reply: SamplesReply, base: Sample, *, merge_session_metadata: bool = True) -> list[Sample]:
    """Samples as copies of `base` with the decoded fields laid over it; metadata is merged.

    A null reward keeps the input's. `merge_session_metadata` is what linear histories do.
    """
    return [_laid_over(base, row, reply.session_metadata if merge_session_metadata else {}) for row in reply.samples]


def _laid_over(base: Sample, row: Mapping[str, Any], session_metadata: Mapping[str, Any]) -> Sample:
    sample = copy.copy(base)
    sample.tokens = [] if row["tokens"] is None else row["tokens"].tolist()
    sample.loss_mask = None if row["loss_mask"] is None else row["loss_mask"].tolist()
    sample.rollout_log_probs = None if row["rollout_log_probs"] is None else row["rollout_log_probs"].tolist()
    sample.rollout_routed_experts = row["rollout_routed_experts"]
    sample.rollout_indexer_topk = row["rollout_indexer_topk"]
    sample.response, sample.response_length = row["response"], row["response_length"]
    sample.status = SampleStatus(row["status"])
    sample.weight_versions = list(row["weight_versions"])
    sample.prefix_cache_info = _counters(PrefixCacheInfo, row["prefix_cache_info"])
    sample.spec_info = _counters(SpecInfo, row["spec_info"])
    sample.metadata = {**base.metadata, **session_metadata, **row["metadata"]}
    if row.get("reward") is not None:
        sample.reward = row["reward"]
    return sample


def _counters(kind: type[Counters], found: Mapping[str, Any]) -> Counters:
    """The counters that we know; a newer server may send more."""
    return kind(**{each.name: found[each.name] for each in fields(kind) if each.name in found})
