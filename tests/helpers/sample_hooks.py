"""Sample hooks that keep or break their contract, named by dotted path in tests."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from miles_core.errors import HistoryError
from miles_core.types import Sample

Samples = list[Sample]


def pick_all(leaf_samples: Samples, session_metadata: dict[str, Any]) -> Samples:
    return leaf_samples


def pick_copy(leaf_samples: Samples, session_metadata: dict[str, Any]) -> Samples:
    return [copy.copy(sample) for sample in leaf_samples]


def pick_twice(leaf_samples: Samples, session_metadata: dict[str, Any]) -> Samples:
    return [*leaf_samples, *leaf_samples]


def pick_and_write(leaf_samples: Samples, session_metadata: dict[str, Any]) -> Samples:
    leaf_samples[0].metadata["mine"] = 1
    return leaf_samples


def pick_nothing_and_raise(leaf_samples: Samples, session_metadata: dict[str, Any]) -> Samples:
    raise ValueError("no taste")


def shorten(leaf_samples: Samples, session_metadata: dict[str, Any]) -> Samples:
    leaf_samples[0].loss_mask = [1]
    return leaf_samples


async def pick_later(leaf_samples: Samples, session_metadata: dict[str, Any]) -> Samples:
    return leaf_samples


async def postprocess_later(leaf_samples: Samples, session_metadata: dict[str, Any]) -> Samples:
    return leaf_samples


def answer_later(leaf_samples: Samples, session_metadata: dict[str, Any]) -> Samples:
    return pick_later(leaf_samples, session_metadata)  # type: ignore[return-value]  # that is its fault


def return_nothing(leaf_samples: Samples, session_metadata: dict[str, Any]) -> Samples:
    return None  # type: ignore[return-value]  # that is its fault


def return_a_tuple(leaf_samples: Samples, session_metadata: dict[str, Any]) -> Samples:
    return tuple(leaf_samples)  # type: ignore[return-value]  # that is its fault


def raise_ours(leaf_samples: Samples, session_metadata: dict[str, Any]) -> Samples:
    raise HistoryError("not these")


def leave_the_program(leaf_samples: Samples, session_metadata: dict[str, Any]) -> Samples:
    sys.exit(3)


def pick_and_write_rows(leaf_samples: Samples, session_metadata: dict[str, Any]) -> Samples:
    leaf_samples[0].rollout_routed_experts[0] = 7
    return leaf_samples


def pick_and_change_tokens(leaf_samples: Samples, session_metadata: dict[str, Any]) -> Samples:
    leaf_samples[-1].tokens[0] += 1
    return leaf_samples


def pick_and_change_the_metadata(leaf_samples: Samples, session_metadata: dict[str, Any]) -> Samples:
    session_metadata["tree"].clear()
    return leaf_samples


def pick_backwards(leaf_samples: Samples, session_metadata: dict[str, Any]) -> Samples:
    return leaf_samples[::-1]


def pick_none(leaf_samples: Samples, session_metadata: dict[str, Any]) -> Samples:
    return []


def give_strangers(leaf_samples: Samples, session_metadata: dict[str, Any]) -> Samples:
    return [*leaf_samples, "sample"]  # type: ignore[list-item]  # that is its fault


def set_field(name: str, value: Any) -> Callable[[Samples, dict[str, Any]], Samples]:
    def postprocess(leaf_samples: Samples, session_metadata: dict[str, Any]) -> Samples:
        setattr(leaf_samples[0], name, value)
        return leaf_samples

    return postprocess


no_mask = set_field("loss_mask", None)
no_log_probs = set_field("rollout_log_probs", None)
reward_nan = set_field("reward", float("nan"))
reward_object = set_field("reward", object())
metadata_surrogate = set_field("metadata", {"a": "\ud83d"})
metadata_list = set_field("metadata", [1])
response_none = set_field("response", None)
status_unknown = set_field("status", "done")
versions_numbers = set_field("weight_versions", [1])
rows_too_many = set_field("rollout_routed_experts", [[[1]]])


def change_each(change: Callable[[Sample], object]) -> Callable[[Samples, dict[str, Any]], Samples]:
    def postprocess(leaf_samples: Samples, session_metadata: dict[str, Any]) -> Samples:
        for sample in leaf_samples:
            change(sample)
        return leaf_samples

    return postprocess


def _mask(sample: Sample) -> list[int]:
    assert sample.loss_mask is not None
    return sample.loss_mask


def _values(sample: Sample) -> list[float]:
    assert sample.rollout_log_probs is not None
    return sample.rollout_log_probs


train_all = change_each(lambda sample: setattr(sample, "loss_mask", [1] * sample.response_length))
make_up_log_probs = change_each(lambda sample: _values(sample).__setitem__(0, _values(sample)[0] - 0.25))
log_probs_nan = change_each(lambda sample: _values(sample).__setitem__(0, float("nan")))
mask_two = change_each(lambda sample: _mask(sample).__setitem__(0, 2))
mask_half = change_each(lambda sample: _mask(sample).__setitem__(0, 0.5))  # type: ignore[call-overload]  # its fault
token_half = change_each(lambda sample: sample.tokens.__setitem__(0, 1.5))  # type: ignore[call-overload]  # its fault
token_huge = change_each(lambda sample: sample.tokens.__setitem__(0, 2**70))
other_tokens = change_each(lambda sample: sample.tokens.__setitem__(-1, 1))
arrays = change_each(lambda sample: setattr(sample, "loss_mask", np.array(sample.loss_mask)))
untrained = change_each(lambda sample: setattr(sample, "loss_mask", [0] * sample.response_length))
of_its_own = change_each(lambda sample: setattr(sample, "metadata", {"mine": 1}))


def shortened_by_one(leaf_samples: Samples, session_metadata: dict[str, Any]) -> Samples:
    return [
        dataclasses.replace(
            sample, tokens=sample.tokens[:-1], response_length=sample.response_length - 1,
            loss_mask=_mask(sample)[:-1], rollout_log_probs=_values(sample)[:-1],
        )
        for sample in leaf_samples
    ]  # fmt: skip
