"""A model family: frozen facts about a chat format, and what follows from them for one checkpoint.

An author writes a `TitoFamily` (facts and a template); `bind` checks it against a checkpoint's tokenizer and
gives a `BoundFamily`, which renders, joins and parses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from miles_core.errors import ConfigError
from miles_core.tito.bound import BoundFamily
from miles_core.tito.choose import choose_revision
from miles_core.tito.parse import ParseFacts
from miles_core.tito.render import (
    ChatTemplate,
    ContentFormat,
    Renderer,
)
from miles_core.tito.tokenizer import Tokenizer, load_chat_template, special_token_variables
from miles_core.types import Tool

NotWritten = Literal["call_ids", "call_names", "text_arguments", "argument_types", "outer_space", "text_blocks"]
"""What a format may not write of a message: ids of calls; names of calls whose id does not tell them; arguments that
are not an object; whether a value is a string, where no tool schema says so; white space around reasoning and content;
how content is cut into parts."""

Otherwise = Literal["no_reasoning", "empty"]
"""Turns that history may write otherwise than a model samples them: without reasoning, behind a prompt that has opened
or closed the block; with nothing said at all."""


@dataclass(frozen=True, kw_only=True)
class Revision:
    """One chat format of a family.

    `template` is a file inside the family's package; None takes `encoder`, and without one the checkpoint's own
    template. `config` are values of the checkpoint's `config.json` (`a.b` looks inside) that tell this revision.
    `parse_facts` replace the family's.

    Detection reads `model_types`, the `model_type` that its checkpoints' configs have; `may_lack_template`, true where
    checkpoints bring a Python encoder and no chat template; and `verified`, in words, what the rendering was checked
    against (empty: nothing).
    """

    name: str
    template: str | None = None
    encoder: Renderer | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    checkpoints: tuple[str, ...] = ()
    fixed_kwargs: Mapping[str, Any] = field(default_factory=dict)
    parse_facts: ParseFacts | None = None
    model_types: tuple[str, ...] = ()
    may_lack_template: bool = False
    verified: str = ""


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
    that do not. `not_written` names what of a message the format loses (see `inverse.py`), `sampled_otherwise` turns
    that history does not write as they were sampled (the session keeps what was sampled). `template_variables`
    gives what the checkpoint's tokenizer class hands to its template, from the tools, beside the usual: it is needed
    to compare with that template. `template_differs` names probes (see `probes.py`) on which the checkpoints' template
    may write something else, each with the reason. `bound_class` is for a quirk that facts cannot say.
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
    not_written: frozenset[NotWritten] = frozenset({"call_ids", "text_arguments"})
    sampled_otherwise: frozenset[Otherwise] = frozenset()
    suffix_needs_tools: bool = False
    suffix_needs_last_turn: bool = False
    template_variables: Callable[[Sequence[Tool]], Mapping[str, Any]] | None = None
    template_differs: Mapping[str, str] = field(default_factory=dict)
    bound_class: type[BoundFamily] | None = None
    best_effort: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError for a text where texts belong: a forgotten comma makes every letter of it a token."""
        for where, value in self._lists():
            if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
                raise ConfigError(f"family {self.name}: {where} is {value!r}, expected a tuple of texts, as ('a',)")
        unknown = sorted(set(self.allowed_append_roles) - {"system", "user", "assistant", "tool", "developer"})
        if unknown:
            raise ConfigError(f"family {self.name}: allowed_append_roles names {unknown[0]!r}, which is no role")

    def _lists(self) -> Iterator[tuple[str, Any]]:
        names = ("checkpoints", "thinking_kwargs", "allowed_append_roles", "role_stop_tokens", "boundary_tokens")
        yield from ((name, getattr(self, name)) for name in (*names, "inner_tokens"))
        for name in ("stop_tokens", "trailing_tokens"):
            if (value := getattr(self, name)) is not None:
                yield name, value
        yield from ((f"kwarg_aliases[{at}]", group) for at, group in enumerate(self.kwarg_aliases))

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
        return ChatTemplate(text, source=f"{self.package}/{revision.template}", trusted=True)
