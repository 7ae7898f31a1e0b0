"""One turn on its way to the engine: the request is placed in the history, and its prompt built."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import orjson

from miles_core.errors import InvariantError, RequestError
from miles_core.session.line import Line, LineCache, Written
from miles_core.session.long_text import TEXT_AT_ONCE, dumps_list
from miles_core.session.policy import HistoryPolicy, Keys, Matcher, Position
from miles_core.session.request import (
    WHOLE_ONLY,
    Checked,
    check_fields,
    check_messages,
    engine_fields,
    key_of_tools,
    live_fields,
    request_messages,
)
from miles_core.session.routing import Replay, request_fields
from miles_core.session.sharing import shared_fields
from miles_core.session.tree import Forest
from miles_core.tito import BoundFamily, normalise_messages
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
    tools_key: bytes | None
    """Of the tools that a new conversation brings."""
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
    tools_key: bytes | None
    tools_changed: bool
    control_tokens: int
    stream: bool
    stream_options: Mapping[str, Any]
    """Those of the agent."""
    new: Written
    """What it adds to that path."""
    keys: Keys
    """Those of the messages that it adds, for the history."""
    content: tuple[bytes, ...]
    """Tools, messages and ids as they are sent: the end of a JSON object, in parts."""

    @property
    def prompt(self) -> array[int]:
        """All ids, as long as the turn is not committed."""
        return self.line.tokens[: self.kept] + self.added

    @property
    def include_usage(self) -> bool:
        """Whether the agent wants token counts at the end of its stream."""
        return bool(self.stream_options.get("include_usage"))

    @property
    def streamable(self) -> bool:
        """Whether an engine can answer it live: it wants nothing that streams do not carry."""
        return self.stream and not any(self.fields.get(key) for key in WHOLE_ONLY)

    def live(self) -> PreparedTurn:
        """The same, which asks the engine for a stream."""
        return replace(self, fields=live_fields(self.fields, self.stream_options))

    def sent(self) -> tuple[bytes, ...]:
        """The engine's request, in parts."""
        short = {key: value for key, value in self.fields.items() if key != "tools" or value is None}
        return orjson.dumps(short)[:-1], *self.content


def prepare_turn(session: Session, body: dict[str, Any], rules: TurnRules, *, rid: str) -> PreparedTurn:
    """Place the request and build its prompt; nothing in the session changes.

    Raises RequestError, HistoryError or RenderError (400), or InvariantError (500) if the family breaks the
    append-only rule.
    """
    return build_turn(place_turn(session, body, rules), rules, rid=rid)


def place_turn(session: Session, request: dict[str, Any] | Checked, rules: TurnRules) -> PlacedTurn:
    """Check the request and find its place: all of a turn's preparation that looks at the session.

    It takes time for what is new in the request, and hardly any for what it repeats of the session's last generation.
    """
    body = request.body if isinstance(request, Checked) else request
    messages = request_messages(body)
    repeated = session.forest.tip.repeated(messages)
    if isinstance(request, Checked):
        key = request.tools_key
    else:
        check_messages(messages, repeated)
        check_fields(body)
        key = key_of_tools(body)
    kwargs = _template_kwargs(session, body, rules)
    tools = session.forest.known_tools(body.get("tools") or None, key)
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
        tools_key=key if base is None else None,
        tools_changed=changed,
        kwargs=kwargs,
        asked=rules.family.merge_kwargs(
            rules.chat_template_kwargs, session.chat_template_kwargs, body.get("chat_template_kwargs")
        ),
    )


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
    fields = {**engine_fields(body, rid), **request_fields(rules.replay, base, kept)}
    if rules.lora_path is not None:
        fields["lora_path"] = rules.lora_path
    if placed.asked:
        fields["chat_template_kwargs"] = placed.asked
    fields = shared_fields(fields, [base] if base is not None else [])
    new = Written.of(position.appended, added)
    return PreparedTurn(
        position=position,
        fields=fields,
        kept=kept,
        added=added,
        encoded=encoded,
        line=line,
        tools=placed.tools,
        tools_key=placed.tools_key,
        tools_changed=placed.tools_changed,
        control_tokens=control,
        stream=bool(body.get("stream")),
        stream_options=body.get("stream_options") or {},
        new=new,
        keys=rules.policy.keys(position.appended),
        content=_content(line, kept, new, fields),
    )


def _content(line: Line, kept: int, new: Written, fields: Mapping[str, Any]) -> tuple[bytes, ...]:
    """The end of the engine's request: all in it that may be long."""
    known = line.ids if kept == len(line.tokens) else line.ids_before(kept)
    parts = (
        b',"tools":[%s]' % dumps_list(fields["tools"]) if fields.get("tools") is not None else b"",
        b',"messages":[', line.messages, b"," if line.messages and new.messages else b"", new.messages,
        b'],"input_ids":[', known, b"," if known and new.ids else b"", new.ids, b"]}",
    )  # fmt: skip
    # the line goes on: it is copied, and so is all that is short, in one go
    long = len(new.messages) + len(new.ids) + len(parts[0]) > TEXT_AT_ONCE
    return tuple(map(bytes, parts)) if long else (b"".join(parts),)


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
