"""A family and a checkpoint together: what renders, joins and parses one model's conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from miles_core.errors import InvariantError, MilesError, RequestError
from miles_core.tito.arguments import ToolSchemas
from miles_core.tito.literals import Literals
from miles_core.tito.parse import StreamParser, TaggedParser
from miles_core.tito.render import ChatTemplate, Renderer, normalise_messages, normalise_tools, shown, written
from miles_core.tito.stream import TextStream
from miles_core.tito.tokenizer import Tokenizer
from miles_core.types import Message, Tool

if TYPE_CHECKING:
    from miles_core.tito.family import Revision, TitoFamily

_DUMMY_CONTENT = "·miles·"
_OPENED_WITHIN = 8
"""How near its end a prompt that leaves the reasoning open has the opening tag, in tokens."""
_PLAIN = frozenset({str, bool, int, type(None)})
_PREFIXES = 64
"""For how many different template kwargs the text of the dummy turn is remembered."""
_DUMMY_TURN: tuple[Message, ...] = (
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": _DUMMY_CONTENT},
)


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
        self._prefixes: dict[tuple[tuple[str, type, Any], ...], str] = {}
        """What the template writes of the dummy turn, by kwargs; a function of them and of what never changes."""
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
        self.parse_facts = revision.parse_facts or family.parse_facts
        tags = self.parse_facts.tags
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
                    f"chat_template_kwargs.{key}={shown(merged[key])} is in conflict with family {self.name}, which "
                    f"fixes {key}={fixed!r} so that turns stay append-only"
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
        return written(
            self.template,
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
        turn, or `last_turn` (the generation before the appended messages) where the template looks at it, or, best
        effort, where it takes no other. Raises InvariantError if the template rewrites the context, that is, if it is
        not append-only.
        """
        ready = normalise_messages(appended, self.family.content_format)
        seen = normalise_tools(tools) if self.family.suffix_needs_tools else None
        effective = self.effective_kwargs(kwargs)
        if last_turn is None:
            return self._suffix(list(_DUMMY_TURN), ready, seen, effective)
        if not self.family.suffix_needs_last_turn:
            try:
                return self._suffix(list(_DUMMY_TURN), ready, seen, effective)
            except MilesError:
                if not self.family.best_effort:
                    raise
        context = [_DUMMY_TURN[0], *normalise_messages([last_turn], self.family.content_format)]
        return self._suffix(context, ready, seen, effective)

    def require_appendable(self, messages: Sequence[Message]) -> None:
        """Raises RequestError (400) naming the roles of `messages` that the format cannot append."""
        allowed = self.family.allowed_append_roles
        refused = sorted({message["role"] for message in messages} - set(allowed))
        if refused:
            raise RequestError(
                f"family {self.name} cannot append messages of role {', '.join(refused)} to a conversation; "
                f"it can append: {', '.join(allowed)}"
            )

    def _suffix(
        self,
        context: list[Message],
        appended: list[Message],
        tools: list[Tool] | None,
        kwargs: Mapping[str, Any],
    ) -> str:
        """What the template adds to `context`."""
        whole = written(self.template, [*context, *appended], tools, kwargs, add_generation_prompt=True)
        prefix = self._prefix(context, tools, kwargs)
        if not whole.startswith(prefix):
            raise InvariantError(
                f"the template {self.template.source} is not append-only: adding "
                f"{[m.get('role') for m in appended]} rewrites the turn before it; check it with a named family"
            )
        return whole[len(prefix) :]

    def _prefix(self, context: list[Message], tools: list[Tool] | None, kwargs: Mapping[str, Any]) -> str:
        """What the template writes of `context`: for the dummy turn it is the same in every turn of equal kwargs."""
        again = context[-1] is _DUMMY_TURN[-1] and not tools and all(type(v) in _PLAIN for v in kwargs.values())
        if not (again and isinstance(self.template, ChatTemplate) and self.template.timeless):
            return written(self.template, context, tools, kwargs, add_generation_prompt=False)
        key = tuple((name, type(value), value) for name, value in kwargs.items())
        found = self._prefixes.get(key)
        if found is None:
            found = written(self.template, context, None, kwargs, add_generation_prompt=False)
            if len(self._prefixes) >= _PREFIXES:
                self._prefixes.clear()
            self._prefixes[key] = found
        return found

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

    def parser(
        self,
        tools: Any = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        prompt_ids: Sequence[int] | None = None,
        calls: bool = True,
        reasoning: bool = True,
    ) -> StreamParser:
        """A parser fed with sampled ids as they come. `calls=False` leaves tool calls as text, likewise `reasoning`.

        `tools` tell which arguments are strings. The prompt may have opened the reasoning block: give its ids, or the
        template kwargs it was rendered with; with neither, the closing tag tells, and text waits for it.
        """
        opened, prompted = self._opening(kwargs, prompt_ids)
        return TaggedParser(
            self.parse_facts,
            TextStream(self.tokenizer, self.hidden_ids),
            ToolSchemas(tools),
            opened=opened,
            prompted=prompted,
            calls=calls,
            reasoning=reasoning,
        )

    def parse(
        self,
        ids: Sequence[int],
        tools: Any = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        calls: bool = True,
        reasoning: bool = True,
    ) -> Message:
        """The message that sampled `ids` spell: the inverse of rendering a generation; total."""
        parser = self.parser(tools, kwargs, calls=calls, reasoning=reasoning)
        parser.feed(ids)
        parser.finish()
        return parser.message()

    @property
    def reads(self) -> frozenset[str]:
        """What of a generation this family tells from content: `reasoning`, `calls`."""
        found = {"reasoning": self.parse_facts.reasoning, "calls": self.parse_facts.calls}
        return frozenset(what for what, fact in found.items() if fact is not None)

    @property
    def reasoning_end(self) -> str | None:
        """The token that ends reasoning, by its text."""
        return self.parse_facts.reasoning[1] if self.parse_facts.reasoning else None

    @cached_property
    def hidden_ids(self) -> frozenset[int]:
        """Special and stop tokens that are no text of a message."""
        return (self.tokenizer.special_ids | frozenset(self.stop_ids)) - self._tag_ids

    def _opening(self, kwargs: Mapping[str, Any] | None, prompt_ids: Sequence[int] | None) -> tuple[bool | None, str]:
        """Whether the prompt opens the reasoning block, and what it writes behind the tag."""
        if self.parse_facts.reasoning is None:
            return False, ""
        if prompt_ids is not None:
            return self._opened_by(self.tokenizer.decode(prompt_ids[-_OPENED_WITHIN:]))
        if kwargs is not None:
            return self._opened_by(self._prompt_text(kwargs))
        return (None if self._may_open else False), ""

    def _opened_by(self, prompt: str) -> tuple[bool, str]:
        opener = self.parse_facts.reasoning[0] if self.parse_facts.reasoning else ""
        _, found, behind = prompt.rpartition(opener)
        return (True, behind) if found and not behind.strip() else (False, "")

    @cached_property
    def _may_open(self) -> bool:
        """Whether a prompt of this family ever opens the block."""
        return self._opened_by(self._prompt_text({}))[0]

    def _prompt_text(self, kwargs: Mapping[str, Any]) -> str:
        """A prompt of these kwargs; nothing if the template does not take them."""
        try:
            return self.template.render(
                list(_DUMMY_TURN[:1]), None, self.effective_kwargs(kwargs), add_generation_prompt=True
            )
        except MilesError:
            return ""

    # -- the self-check's facts --------------------------------------------------------------------------------

    @cached_property
    def boundary_ids(self) -> frozenset[int]:
        """Special tokens at which the self-check cuts a sequence into segments."""
        needed = f"family {self.family.name}"
        added = self.tokenizer.ids_of(self.family.boundary_tokens, needed_by=needed)
        inner = self.tokenizer.ids_of(self.family.inner_tokens, needed_by=needed)
        return (self.tokenizer.special_ids | frozenset(added)) - frozenset(inner)

    @cached_property
    def control_tokens(self) -> Literals:
        """Finds the spelling of every control token that text could turn into."""
        return Literals(self.tokenizer.added_tokens)
