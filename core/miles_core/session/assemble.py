"""A path of generations to one training sample: tokens, mask, log-probs, and where to stop."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miles_core.errors import InvariantError
from miles_core.session.routing import Replay, join_rows, usable_turns
from miles_core.session.tree import Node
from miles_core.session.turn import Session
from miles_core.session.weights import weight_spans
from miles_core.tito import BoundFamily
from miles_core.types import SampleStatus

SPEC_KEYS = ("spec_accept_token_num", "spec_draft_token_num", "spec_verify_ct")


@dataclass(kw_only=True)
class AssembledSample:
    """One sample as it goes to the wire.

    `tokens` int64 `[n]`; `loss_mask` uint8 and `rollout_log_probs` float64, both `[response_length]`; the two
    row arrays int32 `[n - 1, layers, topk]` or None.
    """

    tokens: np.ndarray[Any, np.dtype[np.int64]]
    loss_mask: np.ndarray[Any, np.dtype[np.uint8]]
    rollout_log_probs: np.ndarray[Any, np.dtype[np.float64]]
    response: str
    response_length: int
    status: str
    weight_versions: list[str]
    prefix_cache_info: dict[str, int]
    spec_info: dict[str, int]
    metadata: dict[str, Any]
    rollout_routed_experts: np.ndarray[Any, np.dtype[np.int32]] | None = None
    rollout_indexer_topk: np.ndarray[Any, np.dtype[np.int32]] | None = None
    reward: Any = None
    has_reward: bool = False

    def check(self) -> None:
        """Raise InvariantError unless lengths and values agree; called before anything is sent."""
        lengths = (len(self.loss_mask), len(self.rollout_log_probs))
        if lengths != (self.response_length, self.response_length) or self.response_length > len(self.tokens):
            raise InvariantError(
                f"sample lengths disagree: loss_mask {lengths[0]}, rollout_log_probs {lengths[1]}, "
                f"response_length {self.response_length}, tokens {len(self.tokens)}"
            )
        if ((self.loss_mask != 0) & (self.loss_mask != 1)).any():
            raise InvariantError("loss_mask has values other than 0 and 1")
        if not np.isfinite(self.rollout_log_probs).all():
            raise InvariantError("rollout_log_probs has values that are not finite")
        for name in ("rollout_routed_experts", "rollout_indexer_topk"):
            rows = getattr(self, name)
            if rows is not None and len(rows) != len(self.tokens) - 1:
                raise InvariantError(f"{name} has {len(rows)} rows for {len(self.tokens)} tokens")


@dataclass
class _Line:
    """The growing sequence of one path; positions count from the first token of the prompt."""

    tokens: array[int] = field(default_factory=lambda: array("i"))
    mask: bytearray = field(default_factory=bytearray)
    log_probs: array[float] = field(default_factory=lambda: array("d"))

    def cut(self, length: int) -> None:
        del self.tokens[length:], self.mask[length:], self.log_probs[length:]

    def add_prompt(self, ids: array[int]) -> None:
        self.tokens.extend(ids)
        self.mask.extend(bytes(len(ids)))
        self.log_probs.frombytes(bytes(8 * len(ids)))

    def add_sampled(self, ids: array[int], log_probs: array[float]) -> None:
        self.tokens.extend(ids)
        self.mask.extend(b"\x01" * len(ids))
        self.log_probs.extend(log_probs)


def assemble_path(
    session: Session,
    path: Sequence[Node],
    family: BoundFamily,
    *,
    max_seq_len: int | None,
    replay: Replay | None = None,
) -> AssembledSample | None:
    """The sample of one path, or None if nothing sampled remains within `max_seq_len` tokens.

    Stops at the first turn that is not completed. Raises SampleError (422) for routing rows that do not join.
    """
    replay = replay or Replay()
    used, line, cut = _walk(path, max_seq_len, len(path))
    if (turns := usable_turns(used, replay)) < len(used):
        used, line, cut = _walk(path, max_seq_len, turns)
    if not used:
        return None
    experts, indexer = join_rows(used, replay, len(line.tokens))
    start = used[0].prompt_length
    last = used[-1]
    sample = AssembledSample(
        tokens=np.array(line.tokens, dtype=np.int64),
        loss_mask=np.frombuffer(bytes(line.mask[start:]), dtype=np.uint8),
        rollout_log_probs=np.array(line.log_probs[start:], dtype=np.float64),
        response=family.tokenizer.decode(line.tokens[start:]),
        response_length=len(line.tokens) - start,
        status=_status(session, path, last, cut),
        weight_versions=[version for node in used for version in node.facts.weight_versions],
        prefix_cache_info={
            "cached_tokens": sum(n.facts.cached_tokens for n in used),
            "total_prompt_tokens": sum(n.facts.prompt_tokens for n in used),
        },
        spec_info=_spec_info(used),
        metadata={"lifecycle": _lifecycle(used), "weight_spans": weight_spans(path, used, len(line.tokens))},
        rollout_routed_experts=experts,
        rollout_indexer_topk=indexer,
    )
    sample.check()
    return sample


def _walk(path: Sequence[Node], max_seq_len: int | None, turns: int) -> tuple[list[Node], _Line, bool]:
    """Lay the turns out one behind the other: the turns used, their line, and whether the last was cut."""
    line = _Line()
    used: list[Node] = []
    for index, node in enumerate(path[:turns]):
        line.cut(node.kept)
        before = len(line.tokens)
        line.add_prompt(node.added)
        line.add_sampled(node.sampled, node.log_probs)
        following = path[index + 1] if index + 1 < len(path) else None
        if following is not None and following.kept < node.num_tokens:
            line.cut(following.kept)
        if max_seq_len is not None and len(line.tokens) > max_seq_len:
            if node.prompt_length < max_seq_len:
                line.cut(max_seq_len)
                return [*used, node], line, True
            line.cut(before)
            return used, line, False
        used.append(node)
        if node.truncated:
            break
    return used, line, False


def _status(session: Session, path: Sequence[Node], last: Node, cut: bool) -> str:
    if cut or last.truncated:
        return SampleStatus.TRUNCATED.value
    if last.id in session.abort_marks:
        return SampleStatus.ABORTED.value
    return SampleStatus.COMPLETED.value


def _spec_info(used: Sequence[Node]) -> dict[str, int]:
    info = {key: sum(node.facts.spec.get(key, 0) for node in used) for key in SPEC_KEYS}
    speculative = any(info.values())
    info["completion_token_num"] = sum(len(node.sampled) for node in used) if speculative else 0
    return info


def _lifecycle(used: Sequence[Node]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    previous: float | None = None
    for turn, node in enumerate(used):
        t0, t1 = node.facts.request_timestamp, node.facts.timestamp
        rows.append({"t0": t0, "t1": t1, "turn": turn, "req_ts": t0, "prev_t1": previous})
        previous = t1
    return rows
