"""A template without a family and without a checkpoint: facts that say nothing, and tokens made up for it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import tokenizers

from miles_core.tito import BoundFamily, ChatTemplate, ParseFacts, Revision, TitoFamily, Tokenizer

_CONTROL = re.compile(r"<[^<>\s{}'\"]+>|\[/?[A-Z_]+\]")
"""What looks like a control token in a template's text."""

BARE = TitoFamily(
    name="none",
    summary="a template without a family",
    checkpoints=(),
    revisions=(Revision(name="none"),),
    package=__package__,
    allowed_append_roles=("tool", "user", "system", "assistant"),
    turn_end=None,
    stop_tokens=None,
    trailing_tokens=None,
    assistant_opener=None,
    parse_facts=ParseFacts(),
    best_effort=True,
)
"""No facts beyond the template."""


def bind_bare(text: str, *, source: str, tokenizer: Tokenizer | None, variables: Mapping[str, str]) -> BoundFamily:
    """A template by itself; without a tokenizer, one token per byte and one for what looks like a control token."""
    if tokenizer is None:
        tokenizer = byte_tokenizer(_CONTROL.findall(text), (), source="tokens made up for the template")
    return BARE.bind(tokenizer, template=ChatTemplate(text, source=source, variables=variables))


def byte_tokenizer(special: Iterable[str], plain: Iterable[str], *, source: str) -> Tokenizer:
    """One token per byte, and the given control tokens: special ones, and others that are text of a message."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[])
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    unique = dict.fromkeys(special)
    backend.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in unique])
    backend.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in dict.fromkeys(plain)])
    return Tokenizer(backend, source=source)
