"""A template without a family and without a checkpoint: facts that say nothing, and tokens made up for it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from miles_core.testing.fake_tokenizer import byte_tokenizer
from miles_core.tito import BoundFamily, ChatTemplate, ParseFacts, Revision, TitoFamily, Tokenizer

_CONTROL = re.compile(r"<[^<>\s{}'\"]+>|\[/?[A-Z_]+\]")
"""What looks like a control token in a template's text."""

_SPECIAL_TOKENS = {f"{name}_token": f"<|{name}|>" for name in ("bos", "eos", "pad", "unk")}
"""What templates expect of a tokenizer's configuration, made up."""

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
        variables = {**_SPECIAL_TOKENS, **variables}
        control = [*_CONTROL.findall(text), *variables.values()]
        tokenizer = byte_tokenizer(control, source="tokens made up for the template")
    return BARE.bind(tokenizer, template=ChatTemplate(text, source=source, variables=variables))
