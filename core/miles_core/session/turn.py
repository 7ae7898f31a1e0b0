"""One turn: read the request, place it, build the prompt, check the engine's answer, commit."""

from __future__ import annotations

import logging
import math
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any

import orjson

from miles_core.errors import EngineReplyError, InvariantError, RequestError
from miles_core.session.policy import HistoryPolicy, Matcher, Position
from miles_core.session.routing import Replay, request_fields
from miles_core.session.tree import Forest, Node, TurnFacts, path_messages
from miles_core.tito import BoundFamily, normalise_messages, normalise_tools
from miles_core.types import Message, Tool

log = logging.getLogger("miles.session")

ROUTER_HINT = (
    "a router between us and the engine may strip input_ids and return_meta_info (sglang-router does): "
    "give --engine the workers' own URLs"
)

MAX_DEPTH = 128
"""Levels of nesting in a request's body."""


@dataclass(frozen=True, kw_only=True)
class TurnRules:
    """What is fixed for every turn of a server: the family, who matches messages, and switches."""

    family: BoundFamily
    matches: Matcher
    policy: HistoryPolicy
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reject_control_tokens: bool = False
    on_tools_change: str = "keep"
    replay: Replay = field(default_factory=Replay)
    lora_path: str | None = None


class Session:
    """One rollout's conversation: its forest, its settings, and marks that its metadata shows."""

    def __init__(
        self,
        session_id: str,
        *,
        chat_template_kwargs: Mapping[str, Any],
        metadata: Mapping[str, Any],
        api_key: str | None = None,
    ) -> None:
        self.id = session_id
        self.chat_template_kwargs = dict(chat_template_kwargs)
        self.metadata = dict(metadata)
        self.api_key = api_key
        self.forest = Forest()
        self.closed = False
        self.tools_changed = False
        self.control_tokens = 0
        self.rolled_back = 0
        """How many generations were replaced by later turns."""
        self.diverged: dict[str, Any] | None = None
        """Where a replaced history last differed from the stored one: `{message, role, keys}`."""
        self.abort_marks: set[int | None] = set()
        """Ids of the generations (None: the start) at which a turn was aborted and none committed since."""
        self.worker: str | None = None
        """URL of the engine worker this session keeps to."""


@dataclass(frozen=True, kw_only=True)
class PreparedTurn:
    """A turn ready for the engine. `prompt` is int32; `request` is what is sent, messages and ids included."""

    position: Position
    request: dict[str, Any]
    fields: dict[str, Any]
    prompt: array[int]
    kept: int
    tools: Sequence[Tool] | None
    tools_changed: bool
    control_tokens: int
    stream: bool
    include_usage: bool


def parse_body(raw: bytes) -> dict[str, Any]:
    """The request body as an object. Raises RequestError (400) for anything else, lone surrogates included."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the request body is not valid JSON in valid Unicode: {error}") from error
    if not isinstance(body, dict):
        raise RequestError(f"the request body is a JSON {type(body).__name__}, expected an object")
    if too_deep(body):
        raise RequestError(f"the request body is nested more than {MAX_DEPTH} levels deep")
    return body


def too_deep(value: Any) -> bool:
    """Whether JSON is nested deeper than we take it: orjson reads 1024 levels, but writes 254."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


def prepare_turn(session: Session, body: dict[str, Any], rules: TurnRules, *, rid: str) -> PreparedTurn:
    """Place the request and build its prompt; nothing in the session changes.

    Raises RequestError, HistoryError or RenderError (400), or InvariantError (500) if the family breaks the
    append-only rule.
    """
    messages = _check_request(body)
    kwargs = _template_kwargs(session, body, rules)
    normalise_tools(body.get("tools"))
    tools = body.get("tools") or None
    position = rules.policy.position(session.forest, messages, tools, rules.matches)
    base, family = position.base, rules.family
    offset = base.num_messages if base else 0
    appended = normalise_messages(position.appended, family.family.content_format, first=offset)
    changed = base is not None and tools is not None and tools != base.tools
    if changed and rules.on_tools_change == "refuse":
        raise RequestError(
            "the request's tools differ from those its history was rendered with (--on-tools-change refuse)"
        )
    control = _count_control_tokens(family, appended)
    if control and rules.reject_control_tokens:
        raise RequestError(
            f"{control} control tokens are spelled out in user or tool content (--reject-control-tokens); remove them"
        )
    prompt, kept = _build_prompt(family, position, tools, kwargs)
    _check_ids(family, prompt, kept)
    fields = {**_engine_fields(body, rid), **request_fields(rules.replay, base, kept)}
    if rules.lora_path is not None:
        fields["lora_path"] = rules.lora_path
    asked = family.merge_kwargs(
        rules.chat_template_kwargs, session.chat_template_kwargs, body.get("chat_template_kwargs")
    )
    if asked:
        fields["chat_template_kwargs"] = asked
    request = {**fields, "messages": [*path_messages(base), *position.appended], "input_ids": prompt.tolist()}
    return PreparedTurn(
        position=position,
        request=request,
        fields=fields,
        prompt=prompt,
        kept=kept,
        tools=tools if base is None else base.tools,
        tools_changed=changed,
        control_tokens=control,
        stream=bool(body.get("stream")),
        include_usage=_wants_usage(body),
    )


def _check_request(body: dict[str, Any]) -> list[Message]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"messages must be a non-empty list of chat messages (found {_short(messages)})")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"]:
            raise RequestError(f"messages[{index}] must be an object with a role (found {_short(message)})")
    n = body.get("n")
    if n is not None and (n != 1 or isinstance(n, bool)):
        raise RequestError(f"n={_short(n)}: a session's turn is one generation; n must be 1")
    if body.get("continue_final_message"):
        raise RequestError(
            "continue_final_message is not possible in a session: the server owns the tokens of every turn"
        )
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise RequestError(f"stream must be true or false (found {_short(stream)})")
    kwargs = body.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise RequestError(f"chat_template_kwargs must be an object (found {_short(kwargs)})")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise RequestError(f"stream_options must be an object (found {_short(options)})")
    return messages


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _wants_usage(body: dict[str, Any]) -> bool:
    return bool((body.get("stream_options") or {}).get("include_usage"))


def _template_kwargs(session: Session, body: dict[str, Any], rules: TurnRules) -> dict[str, Any]:
    effort = body.get("reasoning_effort")
    from_effort: dict[str, Any] = {}
    if effort == "none":
        from_effort = dict.fromkeys(rules.family.family.thinking_kwargs, False)
    elif effort is not None:
        from_effort = {"reasoning_effort": effort}
    return rules.family.merge_kwargs(
        rules.chat_template_kwargs,
        session.chat_template_kwargs,
        from_effort,
        body.get("chat_template_kwargs"),
    )


def _build_prompt(
    family: BoundFamily, position: Position, tools: Sequence[Tool] | None, kwargs: Mapping[str, Any]
) -> tuple[array[int], int]:
    base = position.base
    if base is None:
        return array("i", family.encode(family.render(position.appended, tools, kwargs, True))), 0
    refused = {m["role"] for m in position.appended} - set(family.family.allowed_append_roles)
    if refused:
        raise RequestError(
            f"family {family.name} cannot append messages of role {', '.join(sorted(refused))} to a conversation; "
            f"it can append: {', '.join(family.family.allowed_append_roles)}"
        )
    suffix = family.encode(family.render_suffix(base.messages[-1], position.appended, tools, kwargs))
    checkpoint = base.tokens()
    kept, bridge = family.join(checkpoint, suffix)
    prompt = checkpoint[:kept]
    prompt.extend(bridge)
    prompt.extend(suffix)
    _check_prefix(family, checkpoint, prompt)
    return prompt, kept


def _check_prefix(family: BoundFamily, checkpoint: array[int], prompt: array[int]) -> None:
    """The prompt begins with the checkpoint, up to the family's trailing trim."""
    needed = len(checkpoint) - family.family.max_trim_tokens
    if needed <= 0 or prompt[:needed] == checkpoint[:needed]:
        return
    at = next(
        (i for i, (a, b) in enumerate(zip(checkpoint[:needed], prompt, strict=False)) if a != b),
        min(needed, len(prompt)),
    )
    raise InvariantError(
        f"the new prompt does not begin with the checkpoint it extends: first difference at token {at} of {needed}; "
        f"checkpoint {family.tokenizer.decode(checkpoint[at : at + 8])!r}, "
        f"prompt {family.tokenizer.decode(prompt[at : at + 8])!r} "
        f"(family {family.name}, max_trim_tokens={family.family.max_trim_tokens})"
    )


def _check_ids(family: BoundFamily, prompt: array[int], kept: int) -> None:
    size = family.tokenizer.vocab_size
    new = prompt[kept:]
    if new and not (min(new) >= 0 and max(new) < size):
        bad = next(i for i in new if not 0 <= i < size)
        raise RequestError(
            f"the prompt holds token id {bad} ({family.tokenizer.id_to_token(bad)!r}), "
            f"outside the model's vocabulary of {size}"
        )


@lru_cache(maxsize=8)
def _control_pattern(family: BoundFamily) -> re.Pattern[str] | None:
    texts = family.control_texts
    return re.compile("|".join(map(re.escape, texts))) if texts else None


def _count_control_tokens(family: BoundFamily, appended: Sequence[Message]) -> int:
    """How many there are in normalised user and tool messages."""
    pattern = _control_pattern(family)
    if pattern is None:
        return 0
    count = 0
    for message in appended:
        if message["role"] in ("user", "tool"):
            content = message["content"]
            texts = [content] if isinstance(content, str) else [part["text"] for part in content]
            count += sum(len(pattern.findall(text)) for text in texts)
    if count:
        log.warning("%d control tokens are spelled out in user or tool content", count)
    return count


def _engine_fields(body: dict[str, Any], rid: str) -> dict[str, Any]:
    """Every field of the engine's request apart from messages and ids."""
    dropped = {
        "messages",
        "input_ids",
        "stream",
        "stream_options",
        "rid",
        "logprob_start_len",
        "chat_template_kwargs",
    }
    if body.get("logprob_start_len") is not None:
        log.warning(
            "logprob_start_len=%r dropped: scoring the prompt defeats the prefix cache",
            body["logprob_start_len"],
        )
    fields = {key: value for key, value in body.items() if key not in dropped}
    fields.update(logprobs=True, return_meta_info=True, no_stop_trim=False, rid=rid)
    return fields


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
        raise _lacks(engine, f"choices[0].message.tool_calls that is a list of objects (found {_short(calls)})")
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


def commit_turn(
    session: Session,
    turn: PreparedTurn,
    generation: Generation,
    rules: TurnRules,
    *,
    started: float,
    ended: float,
) -> bool:
    """Put a finished turn into the history; False if the session was closed or has moved on meanwhile.

    An aborted generation is not committed; it marks the place it started from. Times are epoch seconds.
    """
    if session.closed or not rules.policy.accepts(session.forest, turn.position):
        return False
    base = turn.position.base
    place = base.id if base else None
    if generation.aborted:
        session.abort_marks.add(place)
        return False
    node = Node(
        id=session.forest.committed,
        seq=session.forest.committed,
        parent=base,
        messages=(*turn.position.appended, generation.message),
        kept=turn.kept,
        added=turn.prompt[turn.kept :],
        sampled=generation.sampled,
        log_probs=generation.log_probs,
        tools=turn.tools,
        request=turn.fields,
        reply=generation.raw,
        facts=_facts(generation, len(turn.prompt), started, ended),
    )
    if turn.position.discarded:
        _note_rollback(session, turn)
    rules.policy.commit(session.forest, node)
    session.abort_marks.discard(place)
    session.tools_changed = session.tools_changed or turn.tools_changed
    session.control_tokens += turn.control_tokens
    return True


def _note_rollback(session: Session, turn: PreparedTurn) -> None:
    """Say that generations were replaced: an agent that changes what it replays loses turns of its sample."""
    position = turn.position
    session.rolled_back += position.discarded
    if position.diverged is None or position.head is None:
        return
    stored = next(islice(path_messages(position.head), position.diverged, None))
    replayed = turn.request["messages"][position.diverged]
    keys = sorted(k for k in stored.keys() | replayed.keys() if (stored.get(k) or None) != (replayed.get(k) or None))
    session.diverged = {"message": position.diverged, "role": stored.get("role"), "keys": keys}
    log.warning(
        "session %s: message %d was not replayed as stored (it differs in %s): %d generation(s) replaced",
        session.id,
        position.diverged,
        ", ".join(keys),
        position.discarded,
    )


def _facts(generation: Generation, prompt_tokens: int, started: float, ended: float) -> TurnFacts:
    meta = generation.meta
    names = {
        "spec_accept_token_num": ("spec_accept_token_num", "spec_num_correct_drafts"),
        "spec_draft_token_num": ("spec_draft_token_num", "spec_num_proposed_drafts"),
        "spec_verify_ct": ("spec_verify_ct",),
    }
    spec = {key: next((_count(meta[name]) for name in found if name in meta), 0) for key, found in names.items()}
    version = meta.get("weight_version")
    response_id = generation.reply.get("id")
    return TurnFacts(
        finish_reason=generation.finish_reason,
        response_id=response_id if isinstance(response_id, str) else None,
        prompt_tokens=_count(meta.get("prompt_tokens")) or prompt_tokens,
        cached_tokens=_count(meta.get("cached_tokens")),
        weight_version="" if version is None else str(version),
        spec=spec,
        request_timestamp=started,
        timestamp=ended,
    )


def _count(value: Any) -> int:
    """A counter of the engine's; 0 if it is none, or none that could be true."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**53:
        return 0
    return int(value)
