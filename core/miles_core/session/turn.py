"""One turn: check the request, place it, build the prompt, and commit what the engine answered."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import orjson

from miles_core.errors import InvariantError, RequestError
from miles_core.session.answer import kept_answer
from miles_core.session.body import check_depth, load_body, short
from miles_core.session.line import Line, LineCache, written_ids, written_messages
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
    lines: LineCache = field(default_factory=LineCache)


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
        self.checked: tuple[int, list[dict[str, Any]] | None] | None = None
        """What the self-check found at the generation of that `seq`."""
        self.worker: str | None = None
        """URL of the engine worker this session keeps to."""

    def frozen(self) -> Session:
        """A copy that later turns do not change: another thread may read it while the session goes on."""
        other = copy(self)
        other.forest = self.forest.frozen()
        other.abort_marks = set(self.abort_marks)
        return other


@dataclass(frozen=True, kw_only=True)
class PlacedTurn:
    """A checked request and its place in the history."""

    body: dict[str, Any]
    position: Position
    line: Line | None
    """The path to that place, if it is written out; it goes on with the session."""
    tools: Sequence[Tool] | None
    tools_changed: bool
    kwargs: Mapping[str, Any]
    """What the template is given."""
    asked: Mapping[str, Any]
    """What the engine is told of it."""

    def is_long(self, characters: int) -> bool:
        """Whether what is to be rendered, tokenized and written is longer than this."""
        base = self.position.base
        left = characters - (base.num_tokens if base is not None and self.line is None else 0)
        for new in (*self.position.appended, *(self.tools or () if base is None else ())):
            content = new.get("content")
            left -= len(content) if isinstance(content, str) and len(new) == 2 else len(orjson.dumps(new))
            if left < 0:
                return True
        return False

    def apart(self) -> PlacedTurn:
        """The same, in which nothing changes when the session goes on: for another thread."""
        return self if self.line is None else replace(self, line=self.line.copy())


@dataclass(frozen=True, kw_only=True)
class PreparedTurn:
    """A turn ready for the engine.

    The prompt is the first `kept` ids of the generation it extends, and `added`, int32, whose last `encoded` come from
    one text. `fields` is what is sent, apart from messages and ids.
    """

    position: Position
    fields: dict[str, Any]
    kept: int
    added: array[int]
    encoded: int
    line: Line
    """The path to the turn's place."""
    tools: Sequence[Tool] | None
    tools_changed: bool
    control_tokens: int
    stream: bool
    include_usage: bool
    content: bytes
    """Messages and ids as they are sent: the end of a JSON object."""

    @property
    def prompt(self) -> array[int]:
        """All ids, as long as the turn is not committed."""
        return self.line.tokens[: self.kept] + self.added

    def sent(self) -> bytes:
        """The engine's request."""
        return orjson.dumps(self.fields)[:-1] + self.content


def prepare_turn(session: Session, body: dict[str, Any], rules: TurnRules, *, rid: str) -> PreparedTurn:
    """Place the request and build its prompt; nothing in the session changes.

    Raises RequestError, HistoryError or RenderError (400), or InvariantError (500) if the family breaks the
    append-only rule.
    """
    return build_turn(place_turn(session, body, rules), rules, rid=rid)


def place_turn(session: Session, body: dict[str, Any], rules: TurnRules, *, checked: bool = False) -> PlacedTurn:
    """Check the request and find its place: all of a turn's preparation that looks at the session.

    It takes time for what is new in the request, and hardly any for what it repeats of the session's last generation;
    `checked` says that its messages went through `check_messages` before.
    """
    messages = _messages(body)
    repeated = session.forest.tip.repeated(messages)
    if not checked:
        check_messages(messages, repeated)
    _check_fields(body)
    kwargs = _template_kwargs(session, body, rules)
    normalise_tools(body.get("tools"))
    tools = session.forest.known_tools(body.get("tools") or None)
    position = rules.policy.position(session.forest, messages, tools, rules.matches, repeated)
    base = position.base
    changed = base is not None and tools is not None and tools is not base.tools
    if changed and rules.on_tools_change == "refuse":
        raise RequestError(
            "the request's tools differ from those its history was rendered with (--on-tools-change refuse)"
        )
    return PlacedTurn(
        body=body,
        position=position,
        line=session.forest.line_to(base),
        tools=tools if base is None else base.tools,
        tools_changed=changed,
        kwargs=kwargs,
        asked=rules.family.merge_kwargs(
            rules.chat_template_kwargs, session.chat_template_kwargs, body.get("chat_template_kwargs")
        ),
    )


def load_request(raw: bytes) -> dict[str, Any]:
    """The body of a long request, its messages checked. Looks at no session: any thread may do it."""
    body = load_body(raw)
    check_messages(_messages(body))
    return body


def build_turn(placed: PlacedTurn, rules: TurnRules, *, rid: str) -> PreparedTurn:
    """Render and tokenize what is new, and write the engine's request. Looks at no session: any thread may do it."""
    body, position, family = placed.body, placed.position, rules.family
    base = position.base
    offset = base.num_messages if base else 0
    appended = normalise_messages(position.appended, family.family.content_format, first=offset)
    control = _count_control_tokens(family, appended)
    if control and rules.reject_control_tokens:
        raise RequestError(
            f"{control} control tokens are spelled out in user or tool content (--reject-control-tokens); remove them"
        )
    line = placed.line or Line(base.path() if base else ())
    kept, added, encoded = _build_prompt(family, position, line.tokens, placed.tools, placed.kwargs)
    _check_ids(family, added)
    fields = {**_engine_fields(body, rid), **request_fields(rules.replay, base, kept)}
    if rules.lora_path is not None:
        fields["lora_path"] = rules.lora_path
    if placed.asked:
        fields["chat_template_kwargs"] = placed.asked
    return PreparedTurn(
        position=position,
        fields=fields,
        kept=kept,
        added=added,
        encoded=encoded,
        line=line,
        tools=placed.tools,
        tools_changed=placed.tools_changed,
        control_tokens=control,
        stream=bool(body.get("stream")),
        include_usage=_wants_usage(body),
        content=_content(line, position.appended, kept, added),
    )


def _content(line: Line, appended: Sequence[Message], kept: int, added: array[int]) -> bytes:
    """The end of the engine's request."""
    known = line.ids if kept == len(line.tokens) else line.ids_before(kept)
    return b"".join((
        b',"messages":[', line.messages, b"," if line.messages and appended else b"", written_messages(appended),
        b'],"input_ids":[', known, b"," if known and added else b"", written_ids(added), b"]}",
    ))  # fmt: skip


def _messages(body: dict[str, Any]) -> list[Message]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"messages must be a non-empty list of chat messages (found {short(messages)})")
    return messages


def check_messages(messages: Sequence[Any], repeated: int = 0) -> None:
    """Raise RequestError for messages that are none, but for the first ones, which repeat others that were checked."""
    for index in range(repeated, len(messages)):
        message = messages[index]
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"]:
            raise RequestError(f"messages[{index}] must be an object with a role (found {short(message)})")
    check_depth(messages[repeated:], within=1)


def _check_fields(body: dict[str, Any]) -> None:
    check_depth({key: value for key, value in body.items() if key != "messages"})
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
    family: BoundFamily,
    position: Position,
    checkpoint: array[int],
    tools: Sequence[Tool] | None,
    kwargs: Mapping[str, Any],
) -> tuple[int, array[int], int]:
    """How many ids of the checkpoint the prompt keeps, the ids behind them, and how many of these come from text."""
    base, encode = position.base, family.tokenizer.encode_array
    if base is None:
        prompt = encode(family.render(position.appended, tools, kwargs, True))
        return 0, prompt, len(prompt)
    refused = {m["role"] for m in position.appended} - set(family.family.allowed_append_roles)
    if refused:
        raise RequestError(
            f"family {family.name} cannot append messages of role {', '.join(sorted(refused))} to a conversation; "
            f"it can append: {', '.join(family.family.allowed_append_roles)}"
        )
    suffix = encode(family.render_suffix(base.messages[-1], position.appended, base.tools, kwargs))
    kept, bridge = family.join(checkpoint, suffix)
    if not 0 <= kept <= len(checkpoint):
        raise InvariantError(f"family {family.name} keeps {kept} of the {len(checkpoint)} tokens of a checkpoint")
    added = array("i", bridge)
    added += suffix
    if kept < len(checkpoint):
        _check_prefix(family, checkpoint, kept, added)
    return kept, added, len(suffix)


def _check_prefix(family: BoundFamily, checkpoint: array[int], kept: int, added: array[int]) -> None:
    """The prompt begins with the checkpoint, up to the family's trailing trim."""
    needed = len(checkpoint) - family.family.max_trim_tokens
    again = checkpoint[kept : max(needed, kept)]
    if added[: len(again)] == again:
        return
    at = kept + next((i for i, (a, b) in enumerate(zip(again, added, strict=False)) if a != b), len(added))
    raise InvariantError(
        f"the new prompt does not begin with the checkpoint it extends: first difference at token {at} of {needed}; "
        f"checkpoint {family.tokenizer.decode(checkpoint[at : at + 8])!r}, "
        f"prompt {family.tokenizer.decode(added[at - kept : at - kept + 8])!r} "
        f"(family {family.name}, max_trim_tokens={family.family.max_trim_tokens})"
    )


def _check_ids(family: BoundFamily, added: array[int]) -> None:
    size = family.tokenizer.vocab_size
    new = np.frombuffer(added, dtype=np.int32)
    if len(new) and not (new.min() >= 0 and new.max() < size):
        bad = int(new[(new < 0) | (new >= size)][0])
        raise RequestError(
            f"the prompt holds token id {bad} ({family.tokenizer.id_to_token(bad)!r}), "
            f"outside the model's vocabulary of {size}"
        )


def _count_control_tokens(family: BoundFamily, appended: Sequence[Message]) -> int:
    """How many there are in normalised user and tool messages."""
    count = 0
    for message in appended:
        if message["role"] in ("user", "tool"):
            content = message["content"]
            texts = [content] if isinstance(content, str) else [part["text"] for part in content]
            count += sum(map(family.control_tokens.count, texts))
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
        added=shared_ids(turn.added, near),
        sampled=generation.sampled,
        log_probs=generation.log_probs,
        tools=base.tools if base else session.forest.known_tools(turn.tools),
        request=shared_fields(turn.fields, near),
        answer=kept_answer(generation.raw, generation.meta, [node.answer for node in near]),
        facts=_facts(generation, turn.kept + len(turn.added), started, ended),
        encoded=turn.encoded,
    )
    if turn.position.discarded:
        _note_rollback(session, turn)
    rules.policy.commit(session.forest, node)
    if turn.line.node is base:
        turn.line.grow(node)
        session.forest.line = turn.line
    rules.lines.used(session.forest)
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
    replayed = position.appended[position.diverged - (position.base.num_messages if position.base else 0)]
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
