"""Finished samples as trainers take them: miles, verl and TRL.

Nothing of a trainer is imported, except miles' own `Sample` where it is installed. A sample that was left without a
single response token cannot be trained on, and is refused by name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

from miles_core.types import Sample


def to_miles(samples: Iterable[Sample]) -> list[list[Any]]:
    """Groups of samples, as `RolloutFnTrainOutput.samples` holds them: one list per prompt, in order.

    They are miles' own `Sample` objects where miles is installed, else ours, which have the same fields.
    """
    make = _miles_sample()
    groups: dict[int | None, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_index, []).append(sample)
    return [[make(sample) for sample in sorted(group, key=_place)] for group in groups.values()]


def _place(sample: Sample) -> int:
    return sample.index if sample.index is not None else -1


def _miles_sample() -> Callable[[Sample], Any]:
    try:
        theirs = importlib.import_module("miles.utils.types").Sample
    except ImportError:
        return lambda sample: sample
    return lambda sample: sample if isinstance(sample, theirs) else theirs.from_dict(sample.to_dict())


def to_verl(samples: Iterable[Sample], *, reward_key: str | None = None) -> list[dict[str, Any]]:
    """What `AgentLoopOutput(**one)` of verl takes, one object for each sample, in their order.

    `reward_score` is the sample's reward, or its entry `reward_key`; `extra_fields.reward_extra_info` has a reward that
    is an object as a whole.
    """
    return [_verl(sample, reward_key) for sample in samples]


def _verl(sample: Sample, reward_key: str | None) -> dict[str, Any]:
    prompt, response = _split(sample)
    extra = {"reward_extra_info": dict(sample.reward)} if isinstance(sample.reward, dict) else {}
    return {
        "prompt_ids": prompt,
        "response_ids": response,
        "response_mask": _mask(sample),
        "response_logprobs": _log_probs(sample),
        "routed_experts": sample.rollout_routed_experts,
        "reward_score": _reward(sample, reward_key),
        "num_turns": _turns(sample),
        "metrics": {"tool_calls": sample.non_generation_time},
        "extra_fields": extra,
    }


def to_trl(samples: Iterable[Sample], *, reward_key: str | None = None) -> dict[str, list[Any]]:
    """What a `rollout_func` of TRL's GRPOTrainer returns, for samples in the order of its prompts.

    `env_mask` is 1 where the model sampled; TRL trains on nothing else. `reward` is an extra field: a reward function
    `lambda reward, **_: reward` hands it on. None stays None, which TRL leaves out of the loss.
    """
    samples = list(samples)  # read_samples gives each once
    split = [_split(sample) for sample in samples]
    return {
        "prompt_ids": [prompt for prompt, _ in split],
        "completion_ids": [response for _, response in split],
        "logprobs": [_log_probs(sample) for sample in samples],
        "env_mask": [_mask(sample) for sample in samples],
        "reward": [_reward(sample, reward_key) for sample in samples],
    }


def _split(sample: Sample) -> tuple[list[int], list[int]]:
    """Prompt and response ids."""
    sample.validate()
    if not sample.response_length:
        raise ValueError(f"sample {sample.index} ({sample.status}) has no response to train on; leave it out")
    tokens = [int(token) for token in sample.tokens]
    return tokens[: -sample.response_length], tokens[-sample.response_length :]


def _mask(sample: Sample) -> list[int]:
    """The loss mask; nothing of a sample that is to be removed is trained on."""
    if sample.remove_sample:
        return [0] * sample.response_length
    return [1] * sample.response_length if sample.loss_mask is None else [int(on) for on in sample.loss_mask]


def _log_probs(sample: Sample) -> list[float]:
    if sample.rollout_log_probs is None:
        raise ValueError(f"sample {sample.index} has no rollout_log_probs; none are made up")
    return [float(value) for value in sample.rollout_log_probs]


def _reward(sample: Sample, key: str | None) -> float | None:
    reward = sample.reward
    if isinstance(reward, dict):
        if key is None or key not in reward:
            raise ValueError(f"the reward of sample {sample.index} has {', '.join(reward)}; name one as reward_key")
        reward = reward[key]
    return None if reward is None else float(reward)


def _turns(sample: Sample) -> int:
    """How many generations the sample has, by its mask."""
    mask = sample.loss_mask or [1]
    return sum(1 for at, on in enumerate(mask) if on and (at == 0 or not mask[at - 1]))
