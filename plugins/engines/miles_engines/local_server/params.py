"""From a request's fields to checked sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from miles_engines.local_server.protocol import ApiError, ChatBody, GenerateParams, check_range
from miles_engines.local_server.sampling import SamplingParams

PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")
SAMPLING_FIELDS = {"temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", *PENALTIES}
"""Fields that chat and generate requests have in common, and of which models may bring defaults."""

DEFAULT_NEW_TOKENS = 128
"""What `/generate` samples if not told, as in SGLang."""


def for_chat(body: ChatBody, room: int, defaults: Mapping[str, Any]) -> SamplingParams:
    """A chat request's parameters; `defaults` are the model's own, `room` what fits in the context."""
    values = {**defaults, **body.model_dump(include=SAMPLING_FIELDS, exclude_none=True)}
    top = (body.top_logprobs or 0) if body.logprobs else 0
    return _params(body, values, room, body.min_tokens, top)


def for_generate(params: GenerateParams, room: int, top_logprobs: int) -> SamplingParams:
    """A generate request's parameters."""
    values = params.model_dump(include=SAMPLING_FIELDS, exclude_none=True)
    if params.sampling_seed is not None:
        values["seed"] = params.sampling_seed
    return _params(params, values, room, params.min_new_tokens, top_logprobs)


def choice(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of one of several choices: each draws differently, also from one seed."""
    if params.seed is None or index == 0:
        return params
    return replace(params, seed=params.seed + index)


def chat_limit(body: ChatBody, context: int) -> int | None:
    """How many new tokens a chat request asks for, if it says so."""
    asked = body.max_completion_tokens or body.max_tokens
    if asked is not None and asked > context:
        raise ApiError(
            f"max_completion_tokens is too large: {asked}.This model supports at most {context} completion tokens."
        )
    if asked is not None and asked < 0:
        raise ApiError(f"max_new_tokens must be at least 0, got {asked}.")
    return asked or None


def generate_limit(params: GenerateParams) -> int:
    """How many new tokens a generate request asks for."""
    asked = DEFAULT_NEW_TOKENS if params.max_new_tokens is None else params.max_new_tokens
    if asked < 0:
        raise ApiError(f"max_new_tokens must be at least 0, got {asked}.")
    return asked


def _params(
    body: ChatBody | GenerateParams, values: Mapping[str, Any], room: int, least: int | None, top: int
) -> SamplingParams:
    _check(values)
    check_range("top_logprobs", top, top >= 0, "at least 0")
    if not 0 <= (least or 0) <= room:
        raise ApiError(f"min_new_tokens must be in [0, max_new_tokens({room})], got {least}.")
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return SamplingParams(
        max_new_tokens=room,
        min_new_tokens=least or 0,
        temperature=float(values.get("temperature", 1.0)),
        top_p=float(values.get("top_p", 1.0)),
        top_k=int(values.get("top_k", -1)),
        min_p=float(values.get("min_p", 0.0)),
        seed=values.get("seed"),
        stop=tuple(string for string in stop if string),
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        no_stop_trim=bool(body.no_stop_trim),
        skip_special_tokens=body.skip_special_tokens is not False,
        top_logprobs=top,
        frequency_penalty=float(values.get("frequency_penalty", 0.0)),
        presence_penalty=float(values.get("presence_penalty", 0.0)),
        repetition_penalty=float(values.get("repetition_penalty", 1.0)),
        logit_bias=tuple((values.get("logit_bias") or {}).items()),
    )


def _check(values: Mapping[str, Any]) -> None:
    temperature, top_p = float(values.get("temperature", 1.0)), float(values.get("top_p", 1.0))
    top_k, min_p = int(values.get("top_k", -1)), float(values.get("min_p", 0.0))
    check_range("temperature", temperature, temperature >= 0, "a non-negative finite number")
    check_range("top_p", top_p, 0 < top_p <= 1, "in (0, 1]")
    check_range("min_p", min_p, 0 <= min_p <= 1, "in [0, 1]")
    for name, least in (("frequency_penalty", -2), ("presence_penalty", -2), ("repetition_penalty", 0)):
        value = float(values.get(name, 1.0))
        check_range(name, value, least <= value <= 2, f"in [{least}, 2]")
    check_range("top_k", top_k, top_k == -1 or top_k >= 1, "-1 (disable) or at least 1")
