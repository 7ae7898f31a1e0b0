"""Small tokenizers, and checkpoints made of them, for tests that have no real one at hand."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import tokenizers

from miles_core.tito import BoundFamily, ChatTemplate, ParseFacts, Revision, TitoFamily, Tokenizer

_CONTROL = re.compile(r"<[^<>\s]+>")
_OPENS = re.compile(r"\W\S*\W(?=\w+\Z)")
"""What an assistant's opener has before the role: a control token, however it is spelt."""

CHATML = ChatTemplate(
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    source="plain ChatML",
)
"""For families that take the checkpoint's own template."""


def byte_tokenizer(special: Iterable[str], plain: Iterable[str] = (), *, source: str = "bytes") -> Tokenizer:
    """One token per byte, and the given control tokens: special ones, and others that are text of a message."""
    return Tokenizer(_byte_backend(special, plain), source=source)


def tokenizer_for(family: TitoFamily, *, source: str = "a token per byte") -> Tokenizer:
    """One token per byte, and the control tokens that the family names, in its facts or when it is bound."""
    return byte_tokenizer(*_control_tokens(family), source=source)


def write_checkpoint(
    directory: Path,
    family: TitoFamily,
    *,
    chat_template: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """A checkpoint directory without weights, as `--checkpoint` takes it, with the tokens of `tokenizer_for`; returned.

    `chat_template` is the checkpoint's own; `config` is laid over its `config.json`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    backend = _byte_backend(*_control_tokens(family))
    backend.save(str(directory / "tokenizer.json"))
    settings = {"vocab_size": backend.get_vocab_size(with_added_tokens=True), **(config or {})}
    (directory / "config.json").write_text(json.dumps(settings), "utf-8")
    if chat_template is not None:
        (directory / "chat_template.jinja").write_text(chat_template, "utf-8")
    return directory


def chatml() -> BoundFamily:
    """Plain ChatML, text alone, with one token per byte."""
    family = TitoFamily(
        name="chatml",
        checkpoints=(),
        revisions=(Revision(name="chatml"),),
        package=__package__,
        allowed_append_roles=("tool", "user", "system", "assistant"),
        turn_end="<|im_end|>\n",
        stop_tokens=("<|im_end|>",),
        trailing_tokens=("<|im_end|>", "\n"),
        assistant_opener="<|im_start|>assistant",
        parse_facts=ParseFacts(),
    )
    return family.bind(tokenizer_for(family), template=CHATML)


def _control_tokens(family: TitoFamily) -> tuple[list[str], tuple[str, ...]]:
    """The special tokens that a family names, and the tags that are text of a message."""
    tags = family.parse_facts.tags
    texts = [*(family.trailing_tokens or ()), family.turn_end, family.assistant_opener, "<|im_start|><|im_end|>"]
    named = [token for text in texts for token in _CONTROL.findall(text or "")]
    named += _OPENS.findall(family.assistant_opener or "")
    facts = (*(family.stop_tokens or ()), *family.role_stop_tokens, *family.boundary_tokens, *family.inner_tokens)
    special = [token for token in (*facts, *named) if token not in tags]
    return [*special, *_asked_for(family, special, tags)], tags


def _asked_for(family: TitoFamily, special: Sequence[str], tags: Sequence[str]) -> list[str]:
    """The tokens beyond these that the family asks for by name when it is bound."""
    asked: list[str] = []
    for revision in family.revisions:
        template = CHATML if revision.template is None and revision.encoder is None else None
        with suppress(Exception):  # what is wrong with the family shows when it is really bound
            family.bind(_Asked(_byte_backend(special, tags), asked), revision.name, template=template)
    return asked


class _Asked(Tokenizer):
    """Has every token that it is asked for, and notes those it did not have."""

    def __init__(self, backend: tokenizers.Tokenizer, asked: list[str]) -> None:
        super().__init__(backend)
        self._asked = asked

    def ids_of(self, texts: Sequence[str], *, needed_by: str) -> tuple[int, ...]:
        """Ids, made up where there is none."""
        self._asked += [text for text in texts if self.token_to_id(text) is None]
        return tuple(self.token_to_id(text) or number for number, text in enumerate(texts))


def _byte_backend(special: Iterable[str], plain: Iterable[str]) -> tokenizers.Tokenizer:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[])
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in dict.fromkeys(special)])
    backend.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in dict.fromkeys(plain)])
    return backend
