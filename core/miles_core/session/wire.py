"""The samples payload: a safetensors file with one JSON tensor, written strictly and read strictly."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from safetensors import SafetensorError
from safetensors.numpy import load, save

from miles_core.errors import WireError
from miles_core.types import PrefixCacheInfo, Sample, SampleStatus, SpecInfo

if TYPE_CHECKING:
    from miles_core.session.assemble import AssembledSample

META = "_samples_meta"
TENSORS: Mapping[str, Any] = {
    "tokens": np.int64,
    "loss_mask": np.uint8,
    "rollout_log_probs": np.float64,
    "rollout_routed_experts": np.int32,
    "rollout_indexer_topk": np.int32,
}
JSON_FIELDS = (
    "response",
    "response_length",
    "status",
    "weight_versions",
    "prefix_cache_info",
    "spec_info",
    "metadata",
)


def encode(
    samples: Sequence[AssembledSample],
    session_metadata: Mapping[str, Any],
    *,
    empty_reason: str | None = None,
) -> bytes:
    """The payload of `POST /sessions/{id}/samples`. Raises WireError for values that do not fit."""
    tensors: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for index, sample in enumerate(samples):
        nulls = []
        for name, dtype in TENSORS.items():
            value = getattr(sample, name)
            if value is None:
                nulls.append(name)
            else:
                tensors[f"{name}.{index}"] = _fit(name, value, dtype)
        row = {name: getattr(sample, name) for name in JSON_FIELDS}
        if sample.has_reward:
            row["reward"] = sample.reward
        rows.append({**row, "nulls": nulls})
    meta = {"samples": rows, "session_metadata": dict(session_metadata), "empty_reason": empty_reason}
    try:
        text = orjson.dumps(meta)
    except (TypeError, ValueError) as error:
        raise WireError(f"the samples' metadata does not fit into JSON: {error}") from error
    tensors[META] = np.frombuffer(text, dtype=np.uint8)
    return bytes(save(tensors))


def _fit(name: str, value: Any, dtype: Any) -> Any:
    given = np.asarray(value)
    if not np.can_cast(given.dtype, dtype, "safe"):
        converted = given.astype(dtype)
        if given.size and not np.array_equal(converted, given):
            raise WireError(f"{name}: {given.dtype} values do not fit {np.dtype(dtype).name}")
        given = converted
    return np.ascontiguousarray(given, dtype=dtype)


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
    out = {name: value for name, value in row.items() if name != "nulls"}
    for name, dtype in TENSORS.items():
        tensor = tensors.pop(f"{name}.{index}", None)
        if (tensor is None) != (name in row["nulls"]):
            raise WireError(f"sample {index}: {name} is {'missing' if tensor is None else 'there although it is null'}")
        if tensor is not None and tensor.dtype != dtype:
            raise WireError(f"sample {index}: {name} is {tensor.dtype}, expected {np.dtype(dtype).name}")
        out[name] = tensor
    return out


def apply(reply: SamplesReply, base: Sample, *, merge_session_metadata: bool = True) -> list[Sample]:
    """Samples as copies of `base` with the decoded fields laid over it; metadata is merged.

    A null reward keeps the input's. `merge_session_metadata` is what linear histories do.
    """
    return [_laid_over(base, row, reply.session_metadata if merge_session_metadata else {}) for row in reply.samples]


def _laid_over(base: Sample, row: Mapping[str, Any], session_metadata: Mapping[str, Any]) -> Sample:
    sample = copy.copy(base)
    sample.tokens = row["tokens"].tolist()
    sample.loss_mask = row["loss_mask"].tolist()
    sample.rollout_log_probs = row["rollout_log_probs"].tolist()
    sample.rollout_routed_experts = row["rollout_routed_experts"]
    sample.rollout_indexer_topk = row["rollout_indexer_topk"]
    sample.response, sample.response_length = row["response"], row["response_length"]
    sample.status = SampleStatus(row["status"])
    sample.weight_versions = list(row["weight_versions"])
    sample.prefix_cache_info = PrefixCacheInfo(**row["prefix_cache_info"])
    sample.spec_info = SpecInfo(**row["spec_info"])
    sample.metadata = {**base.metadata, **session_metadata, **row["metadata"]}
    if row.get("reward") is not None:
        sample.reward = row["reward"]
    return sample
