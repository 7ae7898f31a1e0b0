"""The generate function for agents: a session, the agent's work in it, its samples.

Reads from `input.args`: `session_server_url`, and if set `session_server_instance_id`, `session_api_key`,
`max_seq_len`, `session_collect_timeout`; from `input.state`: `agent`, and if set `http` (an aiohttp client).
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from miles_core.errors import ConfigError, MilesError, PluginLoadError
from miles_core.rollout import generation
from miles_core.types import GenerateFnInput, GenerateFnOutput, Sample, SampleStatus

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger(__name__)

DELETE_TIMEOUT = 10.0
"""Seconds; a session that cannot be deleted expires by itself."""

_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}

_OPENAI_FIELDS = """
    frequency_penalty logit_bias logprobs max_completion_tokens max_tokens n parallel_tool_calls presence_penalty
    reasoning_effort response_format seed stop stream stream_options temperature tool_choice tools top_logprobs
    top_p user
"""

_SGLANG_FIELDS = """
    cache_salt chat_template_kwargs custom_logit_processor custom_params ebnf extra_key ignore_eos images_config
    lora_path max_dynamic_patch min_dynamic_patch min_p min_tokens ngram_corpus_id no_stop_trim priority regex
    repetition_penalty return_cached_tokens_details return_hidden_states return_indexer_topk return_meta_info
    return_prompt_token_ids return_routed_experts return_token_ids separate_reasoning session_params
    skip_special_tokens stop_regex stop_token_ids stream_reasoning task top_k use_audio_in_video
"""

_CHAT_FIELDS = frozenset(_OPENAI_FIELDS.split() + _SGLANG_FIELDS.split())
"""What the engine's chat request knows, without what the session server sets itself."""

_OF_A_SESSION = (
    "accumulated_token_ids", "max_trim_tokens", "tito_session_mismatch", "tools_changed", "control_tokens", "aborted",
    "lifecycle", "weight_spans", "diverged", "agent_error", "collect_error", "empty_reason",
)  # fmt: skip
"""Metadata that an earlier attempt has left."""

_SERVER_KEYS = frozenset({"accumulated_token_ids", "tito_session_mismatch", "leaf"})
"""Metadata that the agent cannot replace."""


class SessionServerError(MilesError):
    """The session server refused what this generate function asked of it; carries its status and text."""


@dataclass(frozen=True)
class _Session:
    id: str
    url: str
    """On the server that created it, for what takes the server's key."""
    base_url: str
    """For the agent."""
    api_key: str | None


async def generate(input: GenerateFnInput) -> GenerateFnOutput:
    """One rollout of the run's agent: one sample, or in tree mode a list of siblings."""
    if input.state.agent is None:
        raise ConfigError("the agentic generate function needs an agent: give --agent NAME")
    generation.check_sessions(input.args)
    _begin_anew(input.sample)
    if (length := _too_long(input)) is not None:
        return GenerateFnOutput(_not_run(input, length))
    async with _client(input.state) as http:
        session = await _create(http, input.args)
        try:
            returned = await _run_agent(input, session)
            samples = await _collect(http, input, session, returned)
        finally:
            await _delete(http, input.args, session)
    return GenerateFnOutput(samples[0] if len(samples) == 1 else samples)


def _begin_anew(sample: Sample) -> None:
    """An agent cannot be gone on with: of an attempt that was aborted nothing stays."""
    if sample.status is SampleStatus.ABORTED:
        sample.reset_for_retry()
        sample.metadata = {key: value for key, value in sample.metadata.items() if key not in _OF_A_SESSION}


def _too_long(input: GenerateFnInput) -> int | None:
    """How many tokens the prompt has, if they leave no room for an answer; None also where nobody here can tell."""
    limit = getattr(input.args, "max_seq_len", None)
    if limit is None or getattr(input.state, "family", None) is None:
        return None
    length = len(generation.prompt_ids(input.state, input.sample))
    return length if length >= limit else None


def _not_run(input: GenerateFnInput, length: int) -> Sample:
    """A truncated sample without a turn, and a word about it."""
    text = f"the prompt has {length} tokens, and --max-seq-len is {input.args.max_seq_len}: the agent was not run"
    log.warning("sample %s: %s", input.sample.index, text)
    return _without_turns(input.sample, SampleStatus.TRUNCATED, {"empty_reason": "all_truncated", "agent_error": text})


def chat_request_kwargs(sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters under the names of the chat API; an existing target wins, nulls and unknowns go."""
    given = {key: value for key, value in sampling_params.items() if value is not None}
    for old, new in _RENAMED.items():
        if old in given:
            value = given.pop(old)
            given.setdefault(new, value)
    return {key: value for key, value in given.items() if key in _CHAT_FIELDS}


def agent_metadata(input: GenerateFnInput, session: _Session) -> dict[str, Any]:
    """What the agent is told: the sample's metadata, its label, and where its session is."""
    metadata = copy.deepcopy(input.sample.metadata)
    metadata.setdefault("label", copy.deepcopy(input.sample.label))
    metadata["session_server_id"] = urlsplit(session.url).netloc
    metadata["session_server_instance_id"] = getattr(input.args, "session_server_instance_id", None) or ""
    if (limit := getattr(input.args, "max_seq_len", None)) is not None:
        metadata["max_seq_len"] = limit
    if session.api_key:
        metadata["session_api_key"] = session.api_key
    return metadata


async def _run_agent(input: GenerateFnInput, session: _Session) -> dict[str, Any]:
    """What the agent returned; if it raised, or returned what no metadata can be, a note of that."""
    prompt = input.sample.prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else copy.deepcopy(prompt)
    try:
        returned = await input.state.agent.hook("run_agent")(
            base_url=session.base_url,
            prompt=messages,
            request_kwargs=chat_request_kwargs(input.sampling_params),
            metadata=agent_metadata(input, session),
        )
        return _as_metadata(returned)
    except (ConfigError, PluginLoadError):
        raise
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise
        error: BaseException = asyncio.CancelledError("the agent cancelled itself")
    except (Exception, SystemExit) as raised:
        error = raised
    log.warning("the agent failed, the turns that it took are kept: %s", _text(error))
    return {"agent_error": _text(error)}


def _as_metadata(returned: object) -> dict[str, Any]:
    if returned is None:
        return {}
    if not isinstance(returned, dict):
        raise TypeError(f"run_agent returned {type(returned).__name__}; expected a dict or None")
    json.dumps(returned, allow_nan=False)
    return {**returned, **_reward(returned["reward"])} if "reward" in returned else returned


def _reward(reward: object) -> dict[str, Any]:
    """The reward as a sample takes it; one of another type is left out, with a note."""
    values = reward.values() if isinstance(reward, dict) else [reward]
    if all(value is None or isinstance(value, (int, float)) for value in values):
        return {"reward": float(reward) if isinstance(reward, bool) else reward}
    kind = type(reward).__name__
    text = f"run_agent returned the reward {reward!r} ({kind}); expected a number, or an object of numbers"
    log.warning("%s", text)
    return {"reward": None, "agent_error": f"TypeError: {text}"}


async def _collect(
    http: aiohttp.ClientSession,
    input: GenerateFnInput,
    session: _Session,
    returned: dict[str, Any],
) -> list[Sample]:
    import aiohttp

    from miles_core.session import wire

    timeout = aiohttp.ClientTimeout(total=getattr(input.args, "session_collect_timeout", 300.0))
    body = {"max_seq_len": getattr(input.args, "max_seq_len", None), "metadata": returned or None}
    try:
        url = f"{session.url}/samples"
        async with http.post(url, json=body, headers=_headers(input.args), timeout=timeout) as response:
            payload = await response.read()
            _check(response.status, payload, f"POST {url}")
    except (TimeoutError, aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
        log.warning("samples of session %s are lost: %s: %s", session.id, type(error).__name__, error)
        return [_without_turns(input.sample, SampleStatus.ABORTED, {**returned, "collect_error": _text(error)})]
    reply = wire.decode(payload)
    if not reply.samples:
        cut = reply.empty_reason == "all_truncated"
        status = SampleStatus.TRUNCATED if cut else SampleStatus.ABORTED
        return [_without_turns(input.sample, status, {**returned, "empty_reason": reply.empty_reason})]
    tree = "tree" in reply.session_metadata
    samples = wire.apply(reply, input.sample, merge_session_metadata=not tree)
    return _finish(samples, input.sample, returned, merged=tree)


def _finish(samples: list[Sample], source: Sample, returned: dict[str, Any], *, merged: bool) -> list[Sample]:
    """Lay the agent's metadata and reward over the samples, unless the server's hooks did (tree mode)."""
    metrics = returned.get("agent_metrics")
    tool_time = metrics.get("total_tool_time") if isinstance(metrics, dict) else None
    for sample in samples:
        if not merged:
            _merge(sample, returned)
        if isinstance(tool_time, (int, float)):
            sample.non_generation_time = float(tool_time)
        if len(samples) > 1 and sample.rollout_id is None:
            sample.rollout_id = source.index
    return samples


def _merge(sample: Sample, returned: Mapping[str, Any]) -> None:
    sample.metadata.update({key: value for key, value in returned.items() if key not in _SERVER_KEYS})
    if returned.get("reward") is not None:
        sample.reward = returned["reward"]


def _without_turns(source: Sample, status: SampleStatus, returned: Mapping[str, Any]) -> Sample:
    sample = copy.copy(source)
    sample.metadata = dict(source.metadata)
    sample.loss_mask, sample.rollout_log_probs = [], []
    sample.status = status
    _merge(sample, returned)
    return sample


@asynccontextmanager
async def _client(state: Any) -> AsyncIterator[aiohttp.ClientSession]:
    """The run's shared client, or one of our own where the caller's state has none."""
    shared = getattr(state, "http", None)
    if shared is not None:
        yield shared
        return
    import aiohttp

    connector = aiohttp.TCPConnector(keepalive_timeout=2)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), connector=connector) as own:
        yield own


def _headers(args: Any) -> dict[str, str]:
    key = getattr(args, "session_api_key", None)
    return {"Authorization": f"Bearer {key}"} if key else {}


async def _create(http: aiohttp.ClientSession, args: Any) -> _Session:
    url = f"{args.session_server_url}/sessions"
    async with http.post(url, json={}, headers=_headers(args)) as response:
        payload = await response.read()
        _check(response.status, payload, f"POST {url}")
    try:
        reply = json.loads(payload)
        session_id = str(reply["session_id"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SessionServerError(f"POST {url}: no session server answers there: {_text(error)}", status=502) from error
    own = f"{url}/{session_id}"
    key = reply.get("api_key") or getattr(args, "session_api_key", None)
    return _Session(session_id, own, reply.get("base_url") or own, key)


async def _delete(http: aiohttp.ClientSession, args: Any, session: _Session) -> None:
    import aiohttp

    try:
        timeout = aiohttp.ClientTimeout(total=DELETE_TIMEOUT)
        async with http.delete(session.url, headers=_headers(args), timeout=timeout) as response:
            if response.status not in (204, 404):
                log.warning("session %s was not deleted: status %d", session.id, response.status)
    except (TimeoutError, aiohttp.ClientError) as error:
        log.warning("session %s was not deleted: %s", session.id, _text(error))


def _check(status: int, payload: bytes, request: str) -> None:
    if status >= 400:
        text = payload[:2000].decode("utf-8", "replace")
        try:
            text = str(json.loads(payload)["error"])
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        raise SessionServerError(f"{request}: {status}: {text}", status=status)


def _text(error: BaseException) -> str:
    """Type and text; the OpenAI client keeps a refusal's reason in `body`, and out of the text."""
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    body = getattr(error, "body", None)
    return f"{text}: {body}" if isinstance(body, str) and body not in text else text
