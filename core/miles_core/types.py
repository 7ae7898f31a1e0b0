"""What crosses a boundary: messages, samples, and the arguments of generate functions.

Field names and order of `Sample`, `GenerateFnInput` and `GenerateFnOutput` are those that modules written
for miles use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, TypeAlias

Json: TypeAlias = Any
"""A JSON value as `orjson.loads` gives it."""

Message: TypeAlias = dict[str, Any]
"""One OpenAI chat message, as it travels in JSON."""

Tool: TypeAlias = dict[str, Any]
"""One entry of a chat request's `tools`."""


class SampleStatus(StrEnum):
    """How a sample ended; the values are what is written to disk and to the wire."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class PrefixCacheInfo:
    """Prefix-cache counters, summed over the turns of a sample (tokens)."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Add what one engine reply counted; what it left out counts nothing."""
        self.cached_tokens += meta_info.get("cached_tokens") or 0
        self.total_prompt_tokens += meta_info.get("prompt_tokens") or 0


@dataclass
class SpecInfo:
    """Speculative-decoding counters, summed over the turns of a sample."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Add what one engine reply counted, under the names of older and newer SGLang."""
        self.spec_accept_token_num += _first(meta_info, "spec_accept_token_num", "spec_num_correct_drafts")
        self.spec_draft_token_num += _first(meta_info, "spec_draft_token_num", "spec_num_proposed_drafts")
        self.spec_verify_ct += _first(meta_info, "spec_verify_ct")
        self.completion_token_num += _first(meta_info, "completion_tokens")


def _first(meta_info: Mapping[str, Any], *names: str) -> int:
    """The first of these counters that is there, else 0."""
    return next((int(meta_info[name]) for name in names if meta_info.get(name) is not None), 0)


_STATUS_OF_FINISH: Mapping[str, SampleStatus] = {
    "stop": SampleStatus.COMPLETED,
    "tool_calls": SampleStatus.COMPLETED,
    "length": SampleStatus.TRUNCATED,
    "abort": SampleStatus.ABORTED,
}

_PER_RESPONSE_TOKEN = ("loss_mask", "rollout_log_probs", "teacher_log_probs", "opd_reverse_kl")
_PER_TOKEN_BUT_ONE = ("rollout_routed_experts", "rollout_indexer_topk")


# inside Sample these names are class attributes, which annotations would otherwise pick up
_PrefixCacheInfo: TypeAlias = PrefixCacheInfo
_SpecInfo: TypeAlias = SpecInfo


@dataclass
class Sample:
    """One training sample: a token sequence, what of it was sampled, and how it was scored.

    `tokens` has prompt and response ids; the response is its last `response_length` ids. `loss_mask` and
    `rollout_log_probs` have `response_length` entries: mask 1 on sampled ids, with the engine's
    log-probability (natural logarithm) there and 0.0 elsewhere. `rollout_routed_experts` and
    `rollout_indexer_topk` are int32 arrays `[len(tokens) - 1, layers, topk]`.
    """

    Status = SampleStatus
    PrefixCacheInfo = PrefixCacheInfo
    SpecInfo = SpecInfo

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[Message] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None
    rollout_indexer_topk: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    opd_reverse_kl: list[float] | None = None
    status: SampleStatus = SampleStatus.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    adapter: str | None = None
    reward_spec: Any = None
    routing_key: str | None = None
    non_generation_time: float = 0.0
    spec_info: _SpecInfo = field(default_factory=_SpecInfo)
    prefix_cache_info: _PrefixCacheInfo = field(default_factory=_PrefixCacheInfo)

    @property
    def effective_response_length(self) -> int:
        """How many response tokens are trained on (the sum of the loss mask)."""
        return sum(self.loss_mask) if self.loss_mask is not None else self.response_length

    @property
    def oldest_weight_version(self) -> str | None:
        """The first turn's weight version, or None if no turn carried one."""
        return self.weight_versions[0] if self.weight_versions else None

    def get_reward_value(self, args: Any) -> Any:
        """The reward, or its entry `args.reward_key` where the reward is a dict and a key is set."""
        key = getattr(args, "reward_key", None)
        if key and isinstance(self.reward, dict):
            return self.reward[key]
        return self.reward

    def validate(self) -> None:
        """Raise ValueError, with the numbers, unless every per-token field agrees with `tokens`."""
        if not 0 <= self.response_length <= len(self.tokens):
            raise ValueError(f"response_length {self.response_length} is not within {len(self.tokens)} tokens")
        for name in _PER_RESPONSE_TOKEN:
            value = getattr(self, name)
            if value is not None and len(value) != self.response_length:
                raise ValueError(f"{name} has {len(value)} entries, response_length is {self.response_length}")
        for name in _PER_TOKEN_BUT_ONE:
            value = getattr(self, name)
            if value is not None and len(value) != len(self.tokens) - 1:
                raise ValueError(f"{name} has {len(value)} rows, expected {len(self.tokens) - 1} (tokens - 1)")

    def strip_last_output_tokens(self, n: int, tokenizer: Any) -> None:
        """Cut the last `n` response tokens off every per-token field, and off the text.

        `tokenizer` decodes what is left of the response. Raises ValueError if `n` is negative or the response is
        shorter.
        """
        if not 0 <= n <= self.response_length:
            raise ValueError(f"cannot strip {n} tokens off a response of {self.response_length}")
        if n == 0:
            return
        self.tokens = self.tokens[:-n]
        self.response_length -= n
        for name in (*_PER_RESPONSE_TOKEN, *_PER_TOKEN_BUT_ONE):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, value[:-n])
        rest = self.tokens[len(self.tokens) - self.response_length :]
        self.response = tokenizer.decode(rest) if rest else ""

    def reset_for_retry(self) -> None:
        """Forget everything that was generated; prompt, label, metadata and the sample's place stay."""
        blank = Sample()
        for name in _GENERATED:
            setattr(self, name, getattr(blank, name))

    def update_from_meta_info(self, args: Any, meta_info: Mapping[str, Any]) -> None:
        """Take over what one engine reply says beside its tokens: status, weight version, counters.

        Speculative counters are added where `args.sglang_speculative_algorithm` is set. An unknown finish reason
        leaves the status as it was.
        """
        if getattr(args, "sglang_speculative_algorithm", None):
            self.spec_info.add(meta_info)
        self.prefix_cache_info.add(meta_info)
        if meta_info.get("weight_version") is not None:
            self.weight_versions.append(str(meta_info["weight_version"]))
        finish = meta_info.get("finish_reason")
        kind = finish.get("type") if isinstance(finish, Mapping) else finish
        self.status = _STATUS_OF_FINISH.get(str(kind), self.status)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, JSON-ready apart from the two expert arrays; attributes set beside the fields too."""
        out = dict(self.__dict__)
        out["status"] = self.status.value
        out["spec_info"] = dict(self.spec_info.__dict__)
        out["prefix_cache_info"] = dict(self.prefix_cache_info.__dict__)
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sample:
        """The inverse of `to_dict`; unknown keys become attributes."""
        values = dict(data)
        known = {f.name for f in fields(cls)}
        sample = cls(**{k: v for k, v in values.items() if k in known})
        sample.status = SampleStatus(sample.status)
        if isinstance(sample.spec_info, Mapping):
            sample.spec_info = SpecInfo(**sample.spec_info)
        if isinstance(sample.prefix_cache_info, Mapping):
            sample.prefix_cache_info = PrefixCacheInfo(**sample.prefix_cache_info)
        for key, value in values.items():
            if key not in known:
                setattr(sample, key, value)
        return sample


_GENERATED = (
    *("tokens", "response", "response_length", "reward", "loss_mask", "weight_versions", "rollout_log_probs"),
    *("rollout_routed_experts", "rollout_indexer_topk", "remove_sample", "teacher_log_probs", "opd_reverse_kl"),
    *("status", "non_generation_time", "spec_info", "prefix_cache_info", "multimodal_train_inputs"),
)
"""What `Sample.reset_for_retry` sets back."""


@dataclass
class GenerateFnInput:
    """What a generate function gets: run-wide `state`, the `sample` to fill, and how to sample.

    `state` has `args`, `tokenizer`, `processor` and the default `sampling_params`.
    """

    state: Any
    sample: Sample
    sampling_params: dict[str, Any]
    evaluation: bool = False

    @property
    def args(self) -> Any:
        """The run's settings, with the flags that the generate function registered itself."""
        return self.state.args


@dataclass
class GenerateFnOutput:
    """What a generate function returns: one sample, or a list of siblings."""

    samples: Sample | list[Sample]

    def as_list(self) -> list[Sample]:
        """The samples as a list, whichever form was returned."""
        return self.samples if isinstance(self.samples, list) else [self.samples]
