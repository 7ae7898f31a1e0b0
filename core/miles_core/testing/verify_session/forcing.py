"""Regexes that make a model of a family write an answer or tool calls, worked out from what its template renders.

A request may carry a `regex` where the engine decodes under a grammar (SGLang does). Then even random weights make
tool calls, mostly tokenized in other ways than the tokenizer would: what sessions must get right.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_core.errors import MilesError
from miles_core.testing.verify.sampling import said, sampled_ids
from miles_core.tito import BoundFamily
from miles_core.types import Message, Tool

CALCULATOR: Tool = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an integer expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
"""The one tool of all sessions; any model that calls tools has a use for it."""

_TEXT, _VALUE = "QZTEXTQZ", "QZVALUEQZ"
_FREE = {
    _TEXT: "[A-Za-z]{2,9}( [A-Za-z]{2,9}){1,5}",
    _VALUE: "[1-9][0-9]{0,2} [-+*] [1-9][0-9]{0,2}",
}
"""What stands for the marks: words, and an expression."""

_OPERATORS = frozenset("\\.^$*+?{}[]|()")


@dataclass(frozen=True, kw_only=True)
class Forcing:
    """Regexes for an answer of words, one call and two calls; None for what cannot be forced, with the reason.

    `kwargs` are the template kwargs to force with: they turn thinking off where there is a switch, since grammars wait
    for the end of a reasoning, which random weights never reach.
    """

    kwargs: Mapping[str, Any]
    text: str | None
    call: str | None
    calls: str | None
    why_not: str | None


def forcing_of(bound: BoundFamily) -> Forcing:
    """What can be forced with a family."""
    kwargs = without_thinking(bound)
    try:
        text = _regex(bound, kwargs, {"role": "assistant", "content": _TEXT})
        call, calls = (_regex(bound, kwargs, _calling(bound, count)) for count in (1, 2))
    except Exception as error:  # a family's own code may raise anything
        reason = f"family {bound.name} does not render a call of its own: {type(error).__name__}: {error}"
        return Forcing(kwargs=kwargs, text=None, call=None, calls=None, why_not=reason)
    why: str | None = None
    if text is None or call is None:
        what = "answers" if text is None else "tool calls"
        why = f"family {bound.name} writes {what} with special tokens, which a regex cannot force"
    return Forcing(kwargs=kwargs, text=text, call=call, calls=calls, why_not=why)


def without_thinking(bound: BoundFamily) -> dict[str, Any]:
    """Template kwargs that turn thinking off; none where the family fixes them or has none."""
    try:
        return bound.merge_kwargs(dict.fromkeys(bound.family.thinking_kwargs, False))
    except MilesError:
        return {}


def _calling(bound: BoundFamily, count: int) -> Message:
    """An assistant's message of so many calls; an id of the form `functions.NAME:N` does for formats that write it."""
    arguments = json.dumps({"expression": _VALUE})
    name = CALCULATOR["function"]["name"]
    calls = [
        {"id": f"functions.{name}:{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number in range(count)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _regex(bound: BoundFamily, kwargs: Mapping[str, Any], message: Message) -> str | None:
    """A regex of what a model says for `message`, behind its reasoning; None if it has special tokens inside."""
    asked: list[Message] = [{"role": "user", "content": "u"}]

    def rendered(**more: Any) -> str:
        return bound.render([*asked, {**message, **more}], [CALCULATOR], kwargs, False)

    prompt = bound.render(asked, [CALCULATOR], kwargs)
    turn = said(bound, prompt, rendered(), message, lambda text: rendered(reasoning_content=text))
    if turn is None:
        return None
    ids = _without_stop(bound, sampled_ids(bound, bound.encode(turn.text)))
    if any(token in bound.boundary_ids or token in bound.tokenizer.special_ids for token in ids):
        return None
    text = bound.tokenizer.decode(ids)
    if bound.reasoning_end is not None and bound.reasoning_end in text:
        text = text.rpartition(bound.reasoning_end)[2]
    return regex_of(text) if any(mark in text for mark in _FREE) else None


def _without_stop(bound: BoundFamily, ids: Sequence[int]) -> list[int]:
    """Without the token that ends the turn: the engine lets it follow whatever the regex allows."""
    stops = {*bound.stop_ids, *bound.tokenizer.ids_of(bound.family.role_stop_tokens, needed_by=bound.name)}
    return list(ids[:-1]) if ids and ids[-1] in stops else list(ids)


def regex_of(text: str) -> str:
    """The text as a regex, its marks free; only operators are escaped, since grammars know few escapes."""
    pattern = "".join(f"\\{char}" if char in _OPERATORS else "\\n" if char == "\n" else char for char in text)
    for mark, free in _FREE.items():
        pattern = pattern.replace(mark, free)
    return pattern
