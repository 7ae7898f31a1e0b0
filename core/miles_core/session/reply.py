"""The engine's answer to a turn, checked before anything is believed of it."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from typing import Any

import orjson

from miles_core.errors import EngineReplyError
from miles_core.session.body import MAX_DEPTH, short, too_deep
from miles_core.types import Message

ROUTER_HINT = (
    "a router between us and the engine may strip input_ids and return_meta_info (sglang-router does): "
    "give --engine the workers' own URLs"
)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A checked answer of the engine."""

    reply: dict[str, Any]
    raw: bytes
    message: Message
    sampled: array[int]
    log_probs: array[float]
    finish_reason: str
    aborted: bool

    @property
    def meta(self) -> dict[str, Any]:
        """The engine's `meta_info`."""
        found = self.reply["choices"][0].get("meta_info")
        return found if isinstance(found, dict) else {}


def read_reply(raw: bytes, *, vocab_size: int, engine: str, indexer: bool = False) -> Generation:
    """Check the engine's 200 answer; with `indexer` it must carry the indexer's choices.

    Raises EngineReplyError (502) saying what it lacks.
    """
    try:
        reply = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise EngineReplyError(f"the engine at {engine} answered 200 with invalid JSON: {error}") from error
    return check_reply(reply, raw, vocab_size=vocab_size, engine=engine, indexer=indexer)


def check_reply(reply: Any, raw: bytes, *, vocab_size: int, engine: str, indexer: bool = False) -> Generation:
    """The same for an answer that was read already; `raw` is how it is kept."""
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise _lacks(engine, "choices[0]")
    choice = choices[0]
    meta = choice.get("meta_info")
    finish = _finish_reason(choice, meta)
    message = choice.get("message")
    if finish == "abort":
        return Generation(
            reply=reply,
            raw=raw,
            message=message if isinstance(message, dict) else {},
            sampled=array("i"),
            log_probs=array("d"),
            finish_reason=finish,
            aborted=True,
        )
    if not isinstance(message, dict) or not isinstance(message.get("content"), str):
        raise _lacks(engine, "choices[0].message with content that is a string")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise _lacks(engine, f"choices[0].message.tool_calls that is a list of objects (found {short(calls)})")
    if not isinstance(message.get("role"), str) or not message["role"]:
        message["role"] = "assistant"  # without one, the agent could not send it back
        raw = orjson.dumps(reply)
    if too_deep(message):
        raise EngineReplyError(f"the engine at {engine} sent a message nested more than {MAX_DEPTH} levels deep")
    if not isinstance(meta, dict):
        raise _lacks(engine, f"choices[0].meta_info; {ROUTER_HINT}")
    if indexer and (meta.get("indexer_topk") is None or meta.get("indexer_topk_num_layers") is None):
        raise _lacks(
            engine, "choices[0].meta_info.indexer_topk and indexer_topk_num_layers, which only a patched SGLang sends"
        )
    sampled, log_probs = _read_log_probs(meta, vocab_size, engine)
    return Generation(
        reply=reply,
        raw=raw,
        message=message,
        sampled=sampled,
        log_probs=log_probs,
        finish_reason=finish,
        aborted=False,
    )


def _lacks(engine: str, what: str) -> EngineReplyError:
    return EngineReplyError(f"the answer of the engine at {engine} lacks {what}")


def _finish_reason(choice: dict[str, Any], meta: Any) -> str:
    in_meta = meta.get("finish_reason") if isinstance(meta, dict) else None
    if isinstance(in_meta, dict) and in_meta.get("type") == "abort":
        return "abort"
    return str(choice.get("finish_reason") or "stop")


def _read_log_probs(meta: dict[str, Any], vocab_size: int, engine: str) -> tuple[array[int], array[float]]:
    entries = meta.get("output_token_logprobs")
    if not isinstance(entries, list):
        raise _lacks(engine, "choices[0].meta_info.output_token_logprobs")
    count = meta.get("completion_tokens")
    if len(entries) != count:
        raise EngineReplyError(
            f"the engine at {engine} sent {len(entries)} output_token_logprobs for completion_tokens={count!r}"
        )
    return _columns(entries, vocab_size) or _read_one_by_one(entries, vocab_size, engine)


def _columns(entries: list[Any], vocab_size: int) -> tuple[array[int], array[float]] | None:
    """Ids and log-probs of good entries, checked a column at a time; None if anything is not as it should be."""
    if set(map(type, entries)) != {list} or min(map(len, entries)) < 2:
        return None
    values, tokens = [entry[0] for entry in entries], [entry[1] for entry in entries]
    good = set(map(type, values)) <= {float, int} and set(map(type, tokens)) == {int}
    if not (good and all(map(math.isfinite, values)) and min(tokens) >= 0 and max(tokens) < vocab_size):
        return None
    return array("i", tokens), array("d", values)


def _read_one_by_one(entries: list[Any], vocab_size: int, engine: str) -> tuple[array[int], array[float]]:
    """The same, or an error that names the first bad entry."""
    ids: array[int] = array("i")
    values: array[float] = array("d")
    for position, entry in enumerate(entries):
        value, token = (entry[0], entry[1]) if isinstance(entry, list) and len(entry) >= 2 else (None, None)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise EngineReplyError(
                f"the engine at {engine} sent the log-probability {value!r} for sampled token {position}"
            )
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise EngineReplyError(
                f"the engine at {engine} sampled token id {token!r} at position {position}, "
                f"outside the vocabulary of {vocab_size}"
            )
        ids.append(token)
        values.append(value)
    return ids, values
