"""The samples payload: what is written is read back, and nothing else is read."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pytest
from safetensors.numpy import load, save

from miles_core.errors import InvariantError, WireError
from miles_core.session import wire
from miles_core.session.assemble import AssembledSample
from miles_core.types import Sample, SampleStatus


def sample(**changes: Any) -> AssembledSample:
    """Five tokens, three of them the response."""
    given: dict[str, Any] = {
        "tokens": np.array([1, 2, 3, 4, 2**31], dtype=np.int64),
        "loss_mask": np.array([1, 0, 1], dtype=np.uint8),
        "rollout_log_probs": np.array([-0.5, 0.0, -1e-300]),
        "response": "äöü 🌊",
        "response_length": 3,
        "status": "completed",
        "weight_versions": ["1", "2"],
        "prefix_cache_info": {"cached_tokens": 1, "total_prompt_tokens": 2},
        "spec_info": {
            "spec_accept_token_num": 0,
            "spec_draft_token_num": 0,
            "spec_verify_ct": 0,
            "completion_token_num": 0,
        },
        "metadata": {"lifecycle": []},
        **changes,
    }
    return AssembledSample(**given)


def test_there_and_back() -> None:
    experts = np.arange(4 * 2 * 3, dtype=np.int32).reshape(4, 2, 3)
    made = wire.encode([sample(), sample(rollout_routed_experts=experts)], {"a": 1})
    reply = wire.decode(made)
    assert reply.session_metadata == {"a": 1}
    assert reply.empty_reason is None
    first, second = reply.samples
    assert first["tokens"].tolist() == [1, 2, 3, 4, 2**31]
    assert first["rollout_log_probs"].tolist() == [-0.5, 0.0, -1e-300]
    assert first["response"] == "äöü 🌊"
    assert first["rollout_routed_experts"] is None
    assert np.array_equal(second["rollout_routed_experts"], experts)
    assert "nulls" not in first


def test_the_format() -> None:
    tensors = load(wire.encode([sample()], {}))
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        "_samples_meta": np.uint8,
        "tokens.0": np.int64,
        "loss_mask.0": np.uint8,
        "rollout_log_probs.0": np.float64,
    }
    text = tensors["_samples_meta"].tobytes()
    meta = orjson.loads(text)
    assert orjson.dumps(meta) == text
    assert set(meta) == {"samples", "session_metadata", "empty_reason"}
    assert set(meta["samples"][0]) == {
        "response",
        "response_length",
        "status",
        "weight_versions",
        "prefix_cache_info",
        "spec_info",
        "metadata",
        "nulls",
    }
    assert meta["samples"][0]["nulls"] == ["rollout_routed_experts", "rollout_indexer_topk"]


def test_nothing_to_send() -> None:
    reply = wire.decode(wire.encode([], {}, empty_reason="no_records"))
    assert (reply.samples, reply.empty_reason) == ([], "no_records")


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_mask": np.array([1, 0, 256])},
        {"loss_mask": np.array([1, 0, -1])},
        {"tokens": np.array([1.5, 2, 3, 4, 5])},
        {"tokens": np.array([2**63, 2, 3, 4, 5], dtype=np.uint64)},
        {"rollout_routed_experts": np.full((4, 1, 1), 2**31, dtype=np.int64)},
        {"rollout_indexer_topk": np.full((4, 1, 1), -(2**31) - 1, dtype=np.int64)},
        {"metadata": {"x": object()}},
        {"metadata": {"x": "\ud83d"}},
        {"tokens": np.array([float("nan"), 2, 3, 4, 5])},
        {"tokens": np.array(["1", "2", "3", "4", "5"])},
        {"tokens": [2**70, 2, 3, 4, 5]},
        {"tokens": [None, 2, 3, 4, 5]},
        {"tokens": [[1], [2, 3]]},
        {"rollout_log_probs": ["x", "y", "z"]},
    ],
)
def test_values_that_do_not_fit_are_an_error(changes: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        wire.encode([sample(**changes)], {})


def test_values_that_fit_another_type_do() -> None:
    made = wire.encode([sample(loss_mask=np.array([1, 0, 1], dtype=np.int64))], {})
    assert wire.decode(made).samples[0]["loss_mask"].tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    "changes",
    [
        {"response_length": 2},
        {"loss_mask": np.array([1], dtype=np.uint8)},
        {"rollout_log_probs": np.array([0.0])},
        {"tokens": np.array([1, 2])},
        {"rollout_routed_experts": np.zeros((5, 1, 1), dtype=np.int32)},
    ],
)
def test_lengths_are_checked_before_sending(changes: dict[str, Any]) -> None:
    with pytest.raises(InvariantError):
        sample(**changes).check()


def rewritten(change: Callable[[dict[str, Any], dict[str, Any]], None]) -> bytes:
    tensors = load(wire.encode([sample()], {}))
    meta = orjson.loads(tensors["_samples_meta"].tobytes())
    change(tensors, meta)
    if "_samples_meta" in tensors:
        tensors["_samples_meta"] = np.frombuffer(orjson.dumps(meta), dtype=np.uint8)
    return bytes(save(tensors))


REFUSED: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "unknown tensor": lambda t, m: t.update({"extra": np.zeros(1)}),
    "tensor of a sample that is not there": lambda t, m: t.update({"tokens.1": t["tokens.0"]}),
    "missing tensor": lambda t, m: t.pop("tokens.0"),
    "wrong dtype": lambda t, m: t.update({"tokens.0": t["tokens.0"].astype(np.int32)}),
    "wrong dtype of log-probs": lambda t, m: t.update({"rollout_log_probs.0": np.zeros(3, dtype=np.float32)}),
    "no meta": lambda t, m: t.pop("_samples_meta"),
    "null and there": lambda t, m: m["samples"][0]["nulls"].append("tokens"),
    "unknown null": lambda t, m: m["samples"][0]["nulls"].append("reward"),
    "no nulls": lambda t, m: m["samples"][0].pop("nulls"),
    "no status": lambda t, m: m["samples"][0].pop("status"),
    "no session_metadata": lambda t, m: m.pop("session_metadata"),
    "session_metadata null": lambda t, m: m.update(session_metadata=None),
    "no empty_reason": lambda t, m: m.pop("empty_reason"),
    "no samples": lambda t, m: m.pop("samples"),
    "samples object": lambda t, m: m.update(samples={}),
    "sample null": lambda t, m: m.update(samples=[None]),
    "nulls null": lambda t, m: m["samples"][0].update(nulls=None),
    "nulls of numbers": lambda t, m: m["samples"][0].update(nulls=[1]),
    "nulls of lists": lambda t, m: m["samples"][0].update(nulls=[[]]),
    "empty_reason a number": lambda t, m: m.update(empty_reason=1),
    "response a number": lambda t, m: m["samples"][0].update(response=1),
    "response_length text": lambda t, m: m["samples"][0].update(response_length="3"),
    "response_length true": lambda t, m: m["samples"][0].update(response_length=True),
    "response_length negative": lambda t, m: m["samples"][0].update(response_length=-1),
    "response_length of another sample": lambda t, m: m["samples"][0].update(response_length=2),
    "unknown status": lambda t, m: m["samples"][0].update(status="done"),
    "versions text": lambda t, m: m["samples"][0].update(weight_versions="1"),
    "counters a list": lambda t, m: m["samples"][0].update(spec_info=[]),
    "metadata null": lambda t, m: m["samples"][0].update(metadata=None),
    "tokens in two dimensions": lambda t, m: t.update({"tokens.0": t["tokens.0"].reshape(1, 5)}),
    "tokens a number": lambda t, m: t.update({"tokens.0": np.array(5)}),
    "mask too long": lambda t, m: t.update({"loss_mask.0": np.zeros(4, dtype=np.uint8)}),
    "log-probs in two dimensions": lambda t, m: t.update({"rollout_log_probs.0": np.zeros((3, 1))}),
    "more response than tokens": lambda t, m: t.update({"tokens.0": t["tokens.0"][:2]}),
    "meta in two dimensions": lambda t, m: t.update({"x": t.pop("_samples_meta")}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_payload_that_is_not_ours_is_refused(name: str) -> None:
    payload = rewritten(REFUSED[name])
    with pytest.raises(WireError):
        wire.decode(payload)


@pytest.mark.parametrize(
    "experts",
    [np.zeros((5, 1, 1), dtype=np.int32), np.zeros((4, 1), dtype=np.int32), np.zeros((4, 1, 1), dtype=np.int64)],
)
def test_rows_that_are_not_one_for_each_token_are_refused(experts: Any) -> None:
    tensors = load(wire.encode([sample(rollout_routed_experts=np.zeros((4, 1, 1), dtype=np.int32))], {}))
    assert wire.decode(bytes(save(tensors))).samples[0]["rollout_routed_experts"].shape == (4, 1, 1)
    with pytest.raises(WireError):
        wire.decode(bytes(save({**tensors, "rollout_routed_experts.0": experts})))


def test_a_payload_damaged_anywhere_is_refused_or_read() -> None:
    made = wire.encode([sample(), sample(rollout_routed_experts=np.zeros((4, 2, 3), dtype=np.int32))], {"a": 1})
    draw, refused = random.Random(3), 0
    for _ in range(2000):
        damaged = bytearray(made)
        at = draw.randrange(len(made))
        damaged[at : at + draw.randrange(3)] = draw.choice((b"", b"null", b"[]", bytes([draw.randrange(256)])))
        try:
            wire.apply(wire.decode(bytes(damaged)), Sample())
        except WireError:
            refused += 1
    assert 1000 < refused < 2000


@pytest.mark.parametrize("payload", [b"", b"{}", b"x" * 100, b"\x08\0\0\0\0\0\0\0{}      "])
def test_bytes_that_are_no_safetensors_file(payload: bytes) -> None:
    with pytest.raises(WireError):
        wire.decode(payload)


def test_laid_over_a_sample() -> None:
    more = wire.decode(rewritten(lambda t, m: m["samples"][0]["spec_info"].update(newer=1)))
    assert wire.apply(more, Sample())[0].spec_info == Sample().spec_info
    base = Sample(index=7, reward=0.5, metadata={"mine": 1, "both": "base"}, label="x")
    reply = wire.decode(wire.encode([sample(metadata={"both": "row"})], {"both": "session", "theirs": 2}))
    (linear,) = wire.apply(reply, base)
    assert linear.metadata == {"mine": 1, "theirs": 2, "both": "row"}
    assert linear.tokens == [1, 2, 3, 4, 2**31]
    assert linear.loss_mask == [1, 0, 1]
    assert (linear.index, linear.label, linear.reward) == (7, "x", 0.5)
    assert linear.status is SampleStatus.COMPLETED
    assert base.tokens == []
    assert base.metadata == {"mine": 1, "both": "base"}
    (other,) = wire.apply(reply, base, merge_session_metadata=False)
    assert other.metadata == {"mine": 1, "both": "row"}


@pytest.mark.parametrize(("reward", "expected"), [(None, 0.5), (0, 0), (2.0, 2.0)])
def test_a_null_reward_keeps_the_inputs(reward: Any, expected: float) -> None:
    reply = wire.decode(wire.encode([sample(reward=reward, has_reward=True)], {}))
    assert reply.samples[0]["reward"] == reward
    assert wire.apply(reply, Sample(reward=0.5))[0].reward == expected
