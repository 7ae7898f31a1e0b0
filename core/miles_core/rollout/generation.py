"""What generate functions share that call `/generate` themselves: prompts, budgets, and keeping samples in step.

A sample is changed only when the engine has answered: its tokens, loss mask and log-probabilities then grow together.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miles_core.errors import ConfigError, EngineError, EngineReplyError, RequestError
from miles_core.rollout.engines import Engines, Lane
from miles_core.types import Message, Sample, SampleStatus, Tool

if TYPE_CHECKING:
    from miles_core.tito import BoundFamily

SamplingParams = dict[str, Any]


@dataclass(frozen=True)
class Generation:
    """One checked reply of `/generate`: what was sampled, and everything else the engine said."""

    ids: list[int]
    log_probs: list[float]
    text: str
    meta: Mapping[str, Any]

    @property
    def finish(self) -> str:
        """Why it ended: `stop`, `length` or `abort`."""
        reason = self.meta.get("finish_reason")
        return str(reason.get("type") if isinstance(reason, Mapping) else reason)


def family_of(state: Any) -> BoundFamily:
    """The run's model family. Raises ConfigError where there is none."""
    family: BoundFamily | None = getattr(state, "family", None)
    if family is None:
        raise ConfigError("this generate function needs a model family: give --tito-model NAME and --checkpoint DIR")
    return family


def lane_of(state: Any, sample: Sample) -> AbstractAsyncContextManager[Lane]:
    """The sample's way to an engine, as a context manager. Raises ConfigError where there is no engine."""
    engines: Engines | None = getattr(state, "engines", None)
    if engines is None:
        args = state.args
        if not getattr(args, "sglang_router_ip", None):
            raise ConfigError("this generate function calls an engine: give --engine NAME or --engine URL")
        engines = Engines([f"http://{args.sglang_router_ip}:{args.sglang_router_port}"])
    return engines.lane(sample.routing_key)


def check_sessions(args: Any) -> None:
    """Settings that do not go together with sessions. Raises ConfigError naming the flag and the way out.

    `args` may be a trainer's own: what it does not have is as if it were off.
    """
    if getattr(args, "apply_chat_template", False):
        raise ConfigError(
            "--apply-chat-template with --generate agentic: an agent works with messages, which the session renders\n"
            "  leave the flag out; settings of the template go into --apply-chat-template-kwargs"
        )
    if getattr(args, "pause_generation_mode", None) == "abort":
        raise ConfigError(
            "--pause-generation-mode abort with sessions: the engine would drop the turns under way at each update of "
            "the weights, and agents would see them fail\n  use --pause-generation-mode retract or in_place"
        )
    check_tree(args)


def check_tree(args: Any) -> None:
    """Settings that do not go together with tree histories, likewise."""
    if getattr(args, "use_session_server", None) != "v2":
        return
    if getattr(args, "partial_rollout", False):
        raise ConfigError(
            "--partial-rollout with tree histories (--history tree, --use-session-server v2): a tree cannot be gone on "
            "with later\n  leave --partial-rollout out, or use --history linear"
        )
    if getattr(args, "group_rm", False):
        raise ConfigError(
            "--group-reward (--group-rm) with tree histories (--history tree, --use-session-server v2) would be "
            "computed across the leaves of one rollout\n  use --history linear, or a reward function for single "
            "samples, without --group-reward"
        )
    if getattr(args, "recompute_logprobs_via_prefill", False):
        raise ConfigError(
            "--recompute-logprobs-via-prefill with tree histories (--history tree, --use-session-server v2): leaves "
            "share tokens, and would be scored again one by one\n  leave the flag out, samples have the "
            "log-probabilities they were sampled with, or use --history linear"
        )


def is_over(sample: Sample) -> bool:
    """Whether nothing is left to generate; what is pending or was aborted goes on."""
    return sample.status not in (SampleStatus.PENDING, SampleStatus.ABORTED)


# -- the prompt ----------------------------------------------------------------------------------------------


def begin(state: Any, sample: Sample, tools: Sequence[Tool] | None = None) -> None:
    """Put the prompt's ids into a fresh sample; a partial one keeps what it has.

    Raises ValueError for a partial sample whose log-probabilities are lost: none are made up.
    """
    if not sample.response_length:
        sample.tokens = prompt_ids(state, sample, tools)
        sample.response, sample.loss_mask, sample.rollout_log_probs = "", [], []
        return
    if sample.rollout_log_probs is None:
        raise ValueError(f"sample {sample.index} is partial, and has no rollout_log_probs to go on with")
    if sample.loss_mask is None:
        sample.loss_mask = [1] * sample.response_length
    sample.validate()


def prompt_ids(state: Any, sample: Sample, tools: Sequence[Tool] | None = None) -> list[int]:
    """The ids of the sample's prompt: messages as the family renders them, text as it is."""
    family = getattr(state, "family", None)
    if family is None:
        return _by_tokenizer(state.tokenizer, sample.prompt, tools)
    if isinstance(sample.prompt, str):
        ids: list[int] = family.encode(sample.prompt)
    else:
        ids = family.encode(family.render(sample.prompt, tools, template_kwargs(state)))
    wrong = next((number for number in ids if not 0 <= number < family.tokenizer.vocab_size), None)
    if wrong is not None:
        size = family.tokenizer.vocab_size
        raise RequestError(f"the prompt of sample {sample.index} has id {wrong}, outside the vocabulary of {size}")
    return ids


def rendered(state: Any, sample: Sample) -> str:
    """The sample's prompt as text, with the tools that its metadata has, as the family writes them."""
    if isinstance(sample.prompt, str):
        return sample.prompt
    tools = sample.metadata.get("tools")
    return family_of(state).render(sample.prompt, tools if isinstance(tools, list) else None, template_kwargs(state))


def _by_tokenizer(tokenizer: Any, prompt: str | list[Message], tools: Sequence[Tool] | None) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt, add_special_tokens=False))
    text = tokenizer.apply_chat_template(prompt, tools=tools, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def template_kwargs(state: Any) -> dict[str, Any]:
    """The run's template settings."""
    return dict(getattr(state.args, "chat_template_kwargs", None) or {})


# -- budgets -------------------------------------------------------------------------------------------------


def context_window(args: Any) -> int | None:
    """How many tokens prompt and response may have together, if anything says so."""
    limits = [getattr(args, name, None) for name in ("rollout_max_context_len", "max_seq_len")]
    return min((limit for limit in limits if limit is not None), default=None)


def capped(args: Any, used: int, sampling_params: Mapping[str, Any], *, spent: int = 0) -> SamplingParams | None:
    """The parameters for a request whose prompt has `used` tokens, or None if nothing fits.

    `spent` is what an earlier part of the same generation took of `max_new_tokens`.
    """
    params = dict(sampling_params)
    wanted = params.get("max_new_tokens")
    if wanted is None:
        wanted = getattr(args, "rollout_max_response_len", None)
    window = context_window(args)
    room = [] if wanted is None else [wanted - spent]
    room += [] if window is None else [window - used]
    if not room:
        return params
    if min(room) <= 0:
        return None
    params["max_new_tokens"] = min(room)
    return params


def payload_for(state: Any, input_ids: Sequence[int], sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a `/generate` request; the family's stop tokens are added."""
    params = {key: value for key, value in sampling_params.items() if value is not None}
    family: BoundFamily | None = getattr(state, "family", None)
    if family is not None and not params.get("ignore_eos"):
        stops = {*(params.get("stop_token_ids") or ()), *family.stop_ids}
        params["stop_token_ids"] = sorted(stops)
    return {
        "input_ids": list(input_ids),
        "sampling_params": params,
        "return_logprob": True,
        **replay_fields(state.args),
    }


def replay_fields(args: Any) -> dict[str, Any]:
    """What a request asks for where routed experts or the indexer's choices are recorded."""
    names = {
        "use_rollout_routing_replay": "return_routed_experts",
        "use_rollout_indexer_replay": "return_indexer_topk",
    }
    return {field: True for flag, field in names.items() if getattr(args, flag, False)}


# -- the answer ----------------------------------------------------------------------------------------------


async def ask(
    state: Any, lane: Lane, input_ids: Sequence[int], sampling_params: Mapping[str, Any]
) -> Generation | None:
    """One generation, or None if the engine says that its context is full. Raises EngineError."""
    try:
        reply = await lane.generate(payload_for(state, input_ids, sampling_params))
    except EngineError as error:
        if error.status == 400 and "context length" in error.message:
            return None
        raise
    family = getattr(state, "family", None)
    return read_reply(reply, family.tokenizer.vocab_size if family else None, lane.worker)


def read_reply(reply: Any, vocab_size: int | None = None, engine: str = "the engine") -> Generation:
    """Check a 200 answer. Raises EngineReplyError naming what it lacks."""
    meta = reply.get("meta_info") if isinstance(reply, dict) else None
    if not isinstance(meta, dict) or not isinstance(meta.get("finish_reason"), dict):
        raise EngineReplyError(f"the answer of {engine} to /generate lacks meta_info with a finish_reason")
    text = str(reply.get("text") or "")
    entries = meta.get("output_token_logprobs")
    if entries is None and meta["finish_reason"].get("type") == "abort" and not reply.get("output_ids"):
        return Generation([], [], text, meta)  # aborted while it was queued
    if not isinstance(entries, list):
        raise EngineReplyError(f"the answer of {engine} to /generate lacks meta_info.output_token_logprobs")
    if len(entries) != meta.get("completion_tokens", len(entries)):
        counts = f"{len(entries)} output_token_logprobs for completion_tokens={meta['completion_tokens']}"
        raise EngineReplyError(f"the answer of {engine} to /generate has {counts}")
    ids, log_probs = [int(entry[1]) for entry in entries], [float(entry[0]) for entry in entries]
    for at, (number, value) in enumerate(zip(ids, log_probs, strict=True)):
        if not math.isfinite(value) or number < 0 or (vocab_size is not None and number >= vocab_size):
            raise EngineReplyError(f"{engine} sampled token {number} with log-probability {value} at position {at}")
    return Generation(ids, log_probs, text, meta)


def append(
    args: Any, sample: Sample, prompt: Sequence[int], generation: Generation, *, kept: int | None = None
) -> None:
    """Lay a generation over a sample: `prompt` is all that was sent, see `append_prompt`.

    An aborted generation keeps its tokens, to go on from.
    """
    append_prompt(sample, prompt, kept)
    sample.tokens = [*sample.tokens, *generation.ids]
    sample.loss_mask = [*(sample.loss_mask or ()), *[1] * len(generation.ids)]
    sample.rollout_log_probs = [*(sample.rollout_log_probs or ()), *generation.log_probs]
    sample.response_length = len(sample.loss_mask)
    sample.update_from_meta_info(args, generation.meta)
    take_rows(args, sample, generation.meta)


def append_prompt(sample: Sample, prompt: Sequence[int], kept: int | None = None) -> None:
    """Make a sample end as `prompt` does, which begins with its first `kept` tokens (without `kept`, with all).

    The rest of the sample is taken off; what the prompt adds is masked. Raises ValueError where the prompt rewrites
    more than the end of the response.
    """
    kept = len(sample.tokens) if kept is None else kept
    dropped = len(sample.tokens) - kept
    if not 0 <= dropped <= sample.response_length or list(prompt[:kept]) != list(sample.tokens[:kept]):
        raise ValueError(f"the next prompt of sample {sample.index} does not begin with its first {kept} tokens")
    stays, added = sample.response_length - dropped, list(prompt[kept:])
    sample.tokens = [*sample.tokens[:kept], *added]
    sample.loss_mask = [*(sample.loss_mask or ())[:stays], *[0] * len(added)]
    sample.rollout_log_probs = [*(sample.rollout_log_probs or ())[:stays], *[0.0] * len(added)]
    sample.response_length = len(sample.loss_mask)


def take_rows(args: Any, sample: Sample, meta: Mapping[str, Any]) -> None:
    """Read routed experts and the indexer's choices, `[tokens - 1, layers, topk]`, where they were asked for."""
    import numpy as np

    rows = len(sample.tokens) - 1
    layers = getattr(args, "num_layers", None)
    for key, name, own_layers in (
        ("routed_experts", "rollout_routed_experts", None),
        ("indexer_topk", "rollout_indexer_topk", meta.get("indexer_topk_num_layers")),
    ):
        data = meta.get(key)
        if data is None:
            continue
        flat = np.frombuffer(base64.b64decode(data), dtype=np.int32)
        count = rows * int(own_layers or layers or 0)
        if count <= 0 or flat.size % count:
            raise EngineReplyError(f"{key} has {flat.size} numbers for {rows} rows of {own_layers or layers} layers")
        setattr(sample, name, flat.reshape(rows, int(own_layers or layers or 0), -1))


def spell(state: Any, sample: Sample) -> None:
    """Set the response's text from its ids, as the sample ends."""
    family = getattr(state, "family", None)
    tokenizer = family.tokenizer if family is not None else state.tokenizer
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    sample.response = tokenizer.decode(response) if response else ""
