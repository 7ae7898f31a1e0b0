"""One turn: check the request, place it, build the prompt, and commit what the engine answered."""

from __future__ import annotations

import logging
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any

from miles_core.errors import InvariantError, RequestError
from miles_core.session.answer import kept_answer
from miles_core.session.body import short
from miles_core.session.policy import HistoryPolicy, Matcher, Position
from miles_core.session.reply import Generation
from miles_core.session.routing import Replay, request_fields
from miles_core.session.sharing import beside, shared_fields, shared_ids, shared_messages
from miles_core.session.tree import Forest, Node, TurnFacts, path_messages
from miles_core.tito import BoundFamily, normalise_messages, normalise_tools
from miles_core.types import Message, Tool

log = logging.getLogger("miles.session")


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


def prepare_turn(session: Session, body: dict[str, Any], rules: TurnRules, *, rid: str) -> PreparedTurn:
    """Place the request and build its prompt; nothing in the session changes.

    Raises RequestError, HistoryError or RenderError (400), or InvariantError (500) if the family breaks the
    append-only rule.
    """
    messages = _check_request(body)
    kwargs = _template_kwargs(session, body, rules)
    normalise_tools(body.get("tools"))
    tools = session.forest.known_tools(body.get("tools") or None)
    position = rules.policy.position(session.forest, messages, tools, rules.matches)
    base, family = position.base, rules.family
    offset = base.num_messages if base else 0
    appended = normalise_messages(position.appended, family.family.content_format, first=offset)
    changed = base is not None and tools is not None and tools is not base.tools
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
        raise RequestError(f"messages must be a non-empty list of chat messages (found {short(messages)})")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"]:
            raise RequestError(f"messages[{index}] must be an object with a role (found {short(message)})")
    n = body.get("n")
    if n is not None and (n != 1 or isinstance(n, bool)):
        raise RequestError(f"n={short(n)}: a session's turn is one generation; n must be 1")
    if body.get("continue_final_message"):
        raise RequestError(
            "continue_final_message is not possible in a session: the server owns the tokens of every turn"
        )
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise RequestError(f"stream must be true or false (found {short(stream)})")
    kwargs = body.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise RequestError(f"chat_template_kwargs must be an object (found {short(kwargs)})")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise RequestError(f"stream_options must be an object (found {short(options)})")
    return messages


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
    family.require_appendable(position.appended)
    suffix = family.encode(family.render_suffix(base.messages[-1], position.appended, base.tools, kwargs))
    checkpoint = base.tokens()
    kept, bridge = family.join(checkpoint, suffix)
    if not 0 <= kept <= len(checkpoint):
        raise InvariantError(f"family {family.name} keeps {kept} of the {len(checkpoint)} tokens of a checkpoint")
    prompt = checkpoint[:kept]
    prompt.extend(bridge)
    prompt.extend(suffix)
    if kept < len(checkpoint):
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
    near = beside(session.forest, base)
    node = Node(
        id=session.forest.committed,
        seq=session.forest.committed,
        parent=base,
        messages=shared_messages((*turn.position.appended, generation.message), near),
        kept=turn.kept,
        added=shared_ids(turn.prompt[turn.kept :], near),
        sampled=generation.sampled,
        log_probs=generation.log_probs,
        tools=session.forest.known_tools(turn.tools),
        request=shared_fields(turn.fields, near),
        answer=kept_answer(generation.raw, generation.meta, [node.answer for node in near]),
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
    spec = {key: next(filter(None, (_count(meta.get(name)) for name in found)), 0) for key, found in names.items()}
    response_id = generation.reply.get("id")
    return TurnFacts(
        finish_reason=generation.finish_reason,
        response_id=response_id if isinstance(response_id, str) else None,
        prompt_tokens=_count(meta.get("prompt_tokens")) or prompt_tokens,
        cached_tokens=_count(meta.get("cached_tokens")),
        weight_versions=_weight_versions(meta),
        spec=spec,
        request_timestamp=started,
        timestamp=ended,
    )


def _weight_versions(meta: Mapping[str, Any]) -> tuple[str, ...]:
    """The version of the weights that sampled, or each in order where an update fell inside the generation."""
    spans = meta.get("weight_versions")
    versions = [
        str(span["version"])
        for span in (spans if isinstance(spans, list) else ())
        if isinstance(span, dict) and span.get("version") is not None and span.get("start") != span.get("end")
    ]
    if versions:
        return tuple(version for at, version in enumerate(versions) if at == 0 or version != versions[at - 1])
    version = meta.get("weight_version")
    return ("" if version is None else str(version),)


def _count(value: Any) -> int:
    """A counter of the engine's; 0 if it is none, or none that could be true."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**53:
        return 0
    return int(value)
