"""Checks of model families, on a small tokenizer that has the family's own control tokens.

They show that turns join: what a session has after a turn is what the template gives for the whole
conversation. `miles-plugins verify` shows the same for a real checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import tokenizers

from miles_core.errors import ConfigError
from miles_core.plugins import Plugin
from miles_core.testing.conformance.report import CheckFunction, Skip
from miles_core.tito import BoundFamily, ChatTemplate, TitoFamily, Tokenizer, parse_difference
from miles_core.types import Message, Tool

_CHATML = ChatTemplate(
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    source="the conformance kit's ChatML",
)
"""For families that take the checkpoint's own template."""

_CONTROL = re.compile(r"<[^<>\s]+>")
_TOOLS: list[Tool] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            },
        },
    }
]
_CALL = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
_ASKED: Message = {"role": "user", "content": "What is 1 + 2, naïvely? 数 🙂"}
_APPENDED: Mapping[str, Message] = {
    "tool": {"role": "tool", "content": "3", "tool_call_id": "call_0", "name": "add"},
    "user": {"role": "user", "content": "And 2 + 2?"},
    "system": {"role": "system", "content": "Be brief."},
    "assistant": {"role": "assistant", "content": "Let me see."},
}


class _Turn(NamedTuple):
    """A generation as a model would sample it, and what was rendered around it."""

    name: str
    message: Message
    tools: list[Tool] | None
    prompt: list[int]
    sampled: list[int]


def declares_a_family(plugin: Plugin) -> str | None:
    """`tito_family()` returns a TitoFamily, and the same one every time."""
    family = plugin.call("tito_family")
    if not isinstance(family, TitoFamily):
        return f"tito_family returned {type(family).__name__}; return a TitoFamily"
    if not family.revisions:
        return "the family has no revisions; declare at least one"
    return None if plugin.call("tito_family") == family else "tito_family returns another family each time"


def binds(plugin: Plugin) -> Skip | None:
    """Every revision binds to a tokenizer that has the family's tokens."""
    family: TitoFamily = plugin.call("tito_family")
    bound = {one.revision.name for one in _bound(plugin)}
    left = [revision.name for revision in family.revisions if revision.name not in bound]
    if not left:
        return None
    return Skip(f"{', '.join(left)} needs a real checkpoint's tokenizer; see miles-plugins verify")


def renders(plugin: Plugin) -> str | Skip | None:
    """The text of the messages is in what is rendered."""
    made = 0
    for bound in _bound(plugin):
        made += 1
        text = bound.render([_ASKED], _TOOLS)
        if _ASKED["content"] not in text:
            return f"revision {bound.revision.name} leaves out the user's text: {text!r}"
    return None if made else Skip("no revision could be bound")


def joins(plugin: Plugin) -> str | Skip | None:
    """A turn's tokens with the suffix's equal the whole conversation's, for each role that may follow."""
    made = 0
    for bound in _bound(plugin):
        for turn in _turns(bound):
            for role in bound.family.allowed_append_roles:
                if role == "tool" and not turn.message.get("tool_calls"):
                    continue
                made += 1
                fault = _join_fault(bound, turn, _APPENDED[role])
                if fault is not None:
                    return f"revision {bound.revision.name}, {turn.name} followed by {role}: {fault}"
    return None if made else Skip("no generation could be told apart in what the template renders")


def parses(plugin: Plugin) -> str | Skip | None:
    """Parsing what was sampled gives the message that was rendered."""
    made = 0
    family: TitoFamily = plugin.call("tito_family")
    for bound in _bound(plugin):
        if not bound.reads and not family.best_effort:
            return Skip("the family declares no parse_facts: its generations are read as plain text")
        for turn in _turns(bound):
            made += 1
            read = bound.parse(turn.sampled, turn.tools)
            difference = parse_difference(family, turn.message, read)
            if difference is not None:
                return f"revision {bound.revision.name}: {turn.name} is read wrong: {difference}"
    return None if made else Skip("no generation could be told apart in what the template renders")


def _bound(plugin: Plugin) -> Iterator[BoundFamily]:
    """Each revision, bound to a small tokenizer; none where that takes a real checkpoint's tokens."""
    family: TitoFamily = plugin.call("tito_family")
    for revision in family.revisions:
        template = _CHATML if revision.template is None and revision.encoder is None else None
        try:
            yield family.bind(small_tokenizer(family), revision.name, template=template)
        except ConfigError:
            continue


def small_tokenizer(family: TitoFamily) -> Tokenizer:
    """One token per byte, and the control tokens that the family's facts name."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[])
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    tags = family.parse_facts.tags
    texts = [*(family.trailing_tokens or ()), family.turn_end, family.assistant_opener, "<|im_start|><|im_end|>"]
    named = [token for text in texts for token in _CONTROL.findall(text or "")]
    facts = (*(family.stop_tokens or ()), *family.role_stop_tokens, *family.boundary_tokens, *family.inner_tokens)
    control = dict.fromkeys(token for token in (*facts, *named) if token not in tags)
    backend.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in control])
    backend.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in tags])
    return Tokenizer(backend, source="the conformance kit's tokenizer")


def _turns(bound: BoundFamily) -> Iterator[_Turn]:
    """The generations that the family's format has: an answer, one with reasoning, one with a tool call."""
    answers: dict[str, tuple[Message, list[Tool] | None]] = {
        "an answer": ({"role": "assistant", "content": "It is 3."}, None)
    }
    if "reasoning" in bound.reads:
        thought = {"role": "assistant", "content": "It is 3.", "reasoning_content": "One and two."}
        answers["an answer with reasoning"] = (thought, None)
    if "calls" in bound.reads:
        called = {"role": "assistant", "content": "I add them.", "tool_calls": [_CALL]}
        answers["a tool call"] = (called, _TOOLS)
    for name, (message, tools) in answers.items():
        turn = _sampled(bound, name, message, tools)
        if turn is not None:
            yield turn


def _sampled(bound: BoundFamily, name: str, message: Message, tools: list[Tool] | None) -> _Turn | None:
    """What a model samples to say `message`: from the generation prompt through the stop token."""
    prompt = bound.encode(bound.render([_ASKED], tools))
    whole = bound.encode(bound.render([_ASKED, message], tools, add_generation_prompt=False))
    if whole[: len(prompt)] != prompt:
        return None
    ends = [index for index, token in enumerate(whole) if token in bound.stop_ids and index >= len(prompt)]
    return _Turn(name, message, tools, prompt, whole[len(prompt) : ends[-1] + 1]) if ends else None


def _join_fault(bound: BoundFamily, turn: _Turn, appended: Message) -> str | None:
    checkpoint = [*turn.prompt, *turn.sampled]
    suffix = bound.encode(bound.render_suffix(turn.message, [appended], turn.tools))
    kept, bridge = bound.join(checkpoint, suffix)
    if len(checkpoint) - kept > bound.family.max_trim_tokens:
        return f"join drops {len(checkpoint) - kept} tokens, max_trim_tokens is {bound.family.max_trim_tokens}"
    joined = [*checkpoint[:kept], *bridge, *suffix]
    whole = bound.encode(bound.render([_ASKED, turn.message, appended], turn.tools))
    if joined == whole:
        return None
    at = next(
        (i for i, pair in enumerate(zip(joined, whole, strict=False)) if pair[0] != pair[1]),
        min(len(joined), len(whole)),
    )
    have, want = (bound.tokenizer.decode(ids[at : at + 40]) for ids in (joined, whole))
    return f"token {at} differs: joined {have!r}, the template gives {want!r}"


CHECKS: Mapping[str, CheckFunction] = {
    "declares a family": declares_a_family,
    "binds": binds,
    "renders": renders,
    "joins turns": joins,
    "parses what it renders": parses,
}
