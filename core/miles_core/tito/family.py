"""A model family: frozen facts about a chat format, and what follows from them for one checkpoint.

An author writes a `TitoFamily` (facts and a template); `bind` checks it against a checkpoint's tokenizer and
gives a `BoundFamily`, which renders, joins and parses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

from miles_core.errors import ConfigError, InvariantError, RequestError
from miles_core.tito.choose import choose_revision
from miles_core.tito.parse import ParseFacts, StreamParser
from miles_core.tito.render import (
    ChatTemplate,
    ContentFormat,
    normalise_messages,
    normalise_tools,
)
from miles_core.tito.tokenizer import Tokenizer, load_chat_template, special_token_variables
from miles_core.types import Message, Tool

_DUMMY_CONTENT = "·miles·"
_DUMMY_TURN: tuple[Message, ...] = (
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": _DUMMY_CONTENT},
)


class Renderer(Protocol):
    """Messages to text: a compiled template, or an encoder in Python where a family has no template."""

    @property
    def source(self) -> str:
        """Where it comes from, for messages."""
        ...

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        kwargs: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The text of a conversation whose input is normalised. Raises RenderError for what it cannot carry."""
        ...


@dataclass(frozen=True, kw_only=True)
class Revision:
    """One chat format of a family.

    `template` is a file inside the family's package; None takes `encoder`, and without one the checkpoint's own
    template. `config` are values of the checkpoint's `config.json` (`a.b` looks inside) that tell this revision.
    """

    name: str
    template: str | None = None
    encoder: Renderer | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    checkpoints: tuple[str, ...] = ()
    fixed_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TitoFamily:
    """What the product knows about one model family's chat format; tokens are named by their text.

    `turn_end` is what the template writes after an assistant's content: its end-of-turn token and the
    separator that the model never samples (None: derived from the template). `trailing_tokens` are ignored
    at the end by the self-check. `max_trim_tokens` is how many sampled ids the next turn's rendering may take
    over; `role_stop_tokens` are those it takes over: role markers that the model samples as stop tokens and the
    next turn writes again. `kwarg_aliases` are groups of template kwargs that mean one setting.
    `suffix_needs_tools` says that the template writes tools after the first turn, `suffix_needs_last_turn` that
    what it writes for appended messages depends on the generation before them (the order or names of its calls).
    `boundary_tokens` bound the self-check's segments beside the special tokens, `inner_tokens` are special tokens
    that do not. `bound_class` is for a quirk that facts cannot say.
    """

    name: str
    summary: str = ""
    checkpoints: tuple[str, ...]
    revisions: tuple[Revision, ...]
    package: str
    fixed_kwargs: Mapping[str, Any] = field(default_factory=dict)
    kwarg_aliases: tuple[tuple[str, ...], ...] = ()
    thinking_kwargs: tuple[str, ...] = ("enable_thinking", "thinking")
    content_format: ContentFormat = "string"
    allowed_append_roles: tuple[str, ...]
    turn_end: str | None
    stop_tokens: tuple[str, ...] | None
    trailing_tokens: tuple[str, ...] | None
    assistant_opener: str | None
    parse_facts: ParseFacts
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    max_trim_tokens: int = 0
    role_stop_tokens: tuple[str, ...] = ()
    boundary_tokens: tuple[str, ...] = ()
    inner_tokens: tuple[str, ...] = ()
    suffix_needs_tools: bool = False
    suffix_needs_last_turn: bool = False
    bound_class: type[BoundFamily] | None = None
    best_effort: bool = False

    def revision(self, name: str | None) -> Revision:
        """The named revision, or the declared default. Raises ConfigError listing the known ones."""
        if name is None:
            return self.revisions[0]
        for revision in self.revisions:
            if revision.name == name:
                return revision
        known = ", ".join(r.name for r in self.revisions)
        raise ConfigError(
            f"--tito-model {self.name}@{name}: family {self.name} has no revision {name!r}; it has: {known}"
        )

    def bind(
        self,
        tokenizer: Tokenizer,
        revision: str | None = None,
        *,
        template: ChatTemplate | None = None,
        checkpoint: str | Path | None = None,
    ) -> BoundFamily:
        """The family for one checkpoint.

        `template` replaces the checkpoint's own, and only where the revision brings none. Raises ConfigError
        if the tokenizer lacks a token the family names, or no template can be had.
        """
        root = checkpoint or tokenizer.source or None
        if revision is None:
            chosen, how = choose_revision(self, tokenizer, root)
        else:
            chosen, how = self.revision(revision), "as named"
        renderer = self._renderer(chosen, template, root)
        return (self.bound_class or BoundFamily)(self, chosen, tokenizer, renderer, how)

    def _renderer(
        self,
        revision: Revision,
        given: ChatTemplate | None,
        root: str | Path | None,
    ) -> Renderer:
        if given is not None and (revision.template is not None or revision.encoder is not None):
            raise ConfigError(
                f"family {self.name} brings its own template ({revision.template or 'an encoder'}); "
                f"--chat-template-path {given.source} is only for --tito-model default"
            )
        if (own_renderer := self.renderer_of(revision)) is not None:
            return own_renderer
        if given is not None:
            return given
        own = load_chat_template(root) if root else None
        if root is None or own is None:
            raise ConfigError(
                f"family {self.name} uses the checkpoint's own chat template, and {root or 'the checkpoint'} has none; "
                "give one with --chat-template-path, or name the model's family with --tito-model"
            )
        return ChatTemplate(own, source=f"{root} (the checkpoint's own)", variables=special_token_variables(root))

    def renderer_of(self, revision: Revision) -> Renderer | None:
        """What the family itself brings for a revision: its encoder, its compiled template, or nothing."""
        if revision.encoder is not None or revision.template is None:
            return revision.encoder
        text = resources.files(self.package).joinpath(revision.template).read_text(encoding="utf-8")
        return ChatTemplate(text, source=f"{self.package}/{revision.template}")


class BoundFamily:
    """A family and a checkpoint together: renders, joins and parses. Immutable and safe to share."""

    def __init__(
        self, family: TitoFamily, revision: Revision, tokenizer: Tokenizer, template: Renderer, how: str = "as named"
    ) -> None:
        self.family = family
        self.revision = revision
        self.revision_chosen = how
        """In words, how the revision was found."""
        self.tokenizer = tokenizer
        self.template = template
        self.fixed_kwargs: dict[str, Any] = {**family.fixed_kwargs, **revision.fixed_kwargs}
        needed = f"family {family.name}"
        self.turn_end_ids = self._turn_end()
        stops = family.stop_tokens
        self.stop_ids: tuple[int, ...] = (
            tokenizer.ids_of(stops, needed_by=needed) if stops is not None else self.turn_end_ids[:1]
        )
        trailing = family.trailing_tokens
        self.trailing_ids: frozenset[int] = (
            frozenset(i for text in trailing for i in tokenizer.encode(text))
            if trailing is not None
            else frozenset(self.turn_end_ids)
        )
        tags = family.parse_facts.tags
        self._tag_ids = frozenset(tokenizer.ids_of(tags, needed_by=needed))
        self._role_stop_ids = frozenset(tokenizer.ids_of(family.role_stop_tokens, needed_by=needed))

    @property
    def name(self) -> str:
        """The family's name."""
        return self.family.name

    # -- kwargs ------------------------------------------------------------------------------------------------

    def merge_kwargs(self, *layers: Mapping[str, Any] | None) -> dict[str, Any]:
        """Template kwargs, later layers over earlier ones; aliases of one setting replace each other as a group.

        Raises RequestError for a value in conflict with one the family fixes.
        """
        merged: dict[str, Any] = {}
        for layer in layers:
            for key, value in (layer or {}).items():
                for group in self.family.kwarg_aliases:
                    if key in group:
                        for other in group:
                            merged.pop(other, None)
                merged[key] = value
        for key, fixed in self.fixed_kwargs.items():
            if key in merged and merged[key] != fixed:
                raise RequestError(
                    f"chat_template_kwargs.{key}={merged[key]!r} is in conflict with family {self.name}, which fixes "
                    f"{key}={fixed!r} so that turns stay append-only"
                )
        return merged

    def effective_kwargs(self, kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
        """What the template sees: the request's kwargs with the family's fixed ones."""
        return {**(kwargs or {}), **self.fixed_kwargs}

    # -- rendering ---------------------------------------------------------------------------------------------

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any = None,
        kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of a whole conversation. Raises RenderError (400) for input the format cannot carry."""
        return self.template.render(
            normalise_messages(messages, self.family.content_format),
            normalise_tools(tools),
            self.effective_kwargs(kwargs),
            add_generation_prompt=add_generation_prompt,
        )

    def render_suffix(
        self,
        last_turn: Message | None,
        appended: Sequence[Mapping[str, Any]],
        tools: Any = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that `appended` and the next generation prompt add after a generated turn.

        Independent of the history: rendered behind a short context, whose text is then cut off. That is a dummy
        turn, or `last_turn` (the generation before the appended messages) where the template looks at it. Raises
        InvariantError if the template rewrites the context, that is, if it is not append-only.
        """
        context = self._context(last_turn)
        seen = normalise_tools(tools) if self.family.suffix_needs_tools else None
        effective = self.effective_kwargs(kwargs)
        whole = self.template.render(
            [*context, *normalise_messages(appended, self.family.content_format)],
            seen,
            effective,
            add_generation_prompt=True,
        )
        prefix = self.template.render(context, seen, effective, add_generation_prompt=False)
        if not whole.startswith(prefix):
            raise InvariantError(
                f"the template {self.template.source} is not append-only: adding "
                f"{[m.get('role') for m in appended]} rewrites the turn before it; check it with a named family"
            )
        return whole[len(prefix) :]

    def _context(self, last_turn: Message | None) -> list[Message]:
        """What appended messages are rendered behind."""
        if last_turn is None or not self.family.suffix_needs_last_turn:
            return list(_DUMMY_TURN)
        return [_DUMMY_TURN[0], *normalise_messages([last_turn], self.family.content_format)]

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text; nothing is added."""
        return self.tokenizer.encode(text)

    # -- joining -----------------------------------------------------------------------------------------------

    def join(self, checkpoint_ids: Sequence[int], suffix_ids: Sequence[int]) -> tuple[int, list[int]]:
        """How a checkpoint and a suffix meet: `(kept, bridge_ids)`.

        The prompt is `checkpoint_ids[:kept] + bridge_ids + suffix_ids`. The bridge completes what the template
        writes after an assistant turn: the separator, and the end-of-turn token where the model was cut off. A
        role marker that was sampled as stop token is left to the suffix, which writes the next turn's.
        """
        if checkpoint_ids and checkpoint_ids[-1] in self._role_stop_ids:
            return len(checkpoint_ids) - 1, []
        end = self.turn_end_ids
        have = next((k for k in range(len(end), 0, -1) if tuple(checkpoint_ids[-k:]) == end[:k]), 0)
        return len(checkpoint_ids), list(end[have:])

    def _turn_end(self) -> tuple[int, ...]:
        if self.family.turn_end is not None:
            return tuple(self.tokenizer.encode(self.family.turn_end))
        try:
            text = self.template.render(
                list(_DUMMY_TURN), None, self.effective_kwargs(None), add_generation_prompt=False
            )
        except Exception:
            return ()
        tail = text.rpartition(_DUMMY_CONTENT)[2]
        ids = tuple(self.tokenizer.encode(tail))
        return ids if ids and ids[0] in self.tokenizer.added_tokens.values() else ()

    # -- parsing -----------------------------------------------------------------------------------------------

    def parser(self, tools: Any = None, *, calls: bool = True, reasoning: bool = True) -> StreamParser:
        """A parser fed with sampled ids as they come. `calls=False` leaves tool calls as text, likewise `reasoning`."""
        hidden = (self.tokenizer.special_ids | frozenset(self.stop_ids)) - self._tag_ids
        return StreamParser(self.family.parse_facts, self.tokenizer, hidden, calls=calls, reasoning=reasoning)

    def parse(self, ids: Sequence[int], tools: Any = None, *, calls: bool = True, reasoning: bool = True) -> Message:
        """The message that sampled `ids` spell: the inverse of rendering a generation; total."""
        parser = self.parser(tools, calls=calls, reasoning=reasoning)
        parser.feed(ids)
        parser.finish()
        return parser.message()

    # -- the self-check's facts --------------------------------------------------------------------------------

    @cached_property
    def boundary_ids(self) -> frozenset[int]:
        """Special tokens at which the self-check cuts a sequence into segments."""
        needed = f"family {self.family.name}"
        added = self.tokenizer.ids_of(self.family.boundary_tokens, needed_by=needed)
        inner = self.tokenizer.ids_of(self.family.inner_tokens, needed_by=needed)
        return (self.tokenizer.special_ids | frozenset(added)) - frozenset(inner)

    @cached_property
    def control_texts(self) -> tuple[str, ...]:
        """The spelling of every control token that text could turn into."""
        return tuple(sorted(self.tokenizer.added_tokens, key=len, reverse=True))
