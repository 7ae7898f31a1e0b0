"""What a model would sample to say a message, worked out from what the family renders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from miles_core.tito import BoundFamily
from miles_core.types import Message

_MARK = "·thought·"


@dataclass(frozen=True, kw_only=True)
class Said:
    """A generation as text: what the model writes behind `prompt`, up to where the next message begins.

    `history` is the conversation with the message as the template writes it later. It is `prompt + text` unless
    `otherwise` is set: then the template writes the message in another way than the prompt lets a model say it.
    """

    prompt: str
    text: str
    history: str
    otherwise: bool


def said(bound: BoundFamily, prompt: str, history: str, message: Message, marked: Callable[[str], str]) -> Said | None:
    """How a model says `message` behind `prompt`; None if what the family renders leaves no way to say it.

    `history` is the conversation through the message as it is written later, `marked` gives the same with another
    reasoning. Where the prompt has opened (or closed) a reasoning block that history then leaves out, the model has
    closed it and said the rest as it would have behind a reasoning: the form with a reasoning, without that reasoning.
    Where history leaves out a turn that says nothing, the model has stopped at once.
    """
    if history.startswith(prompt):
        return Said(prompt=prompt, text=history[len(prompt) :], history=history, otherwise=False)
    if message.get("reasoning_content"):
        return None
    if says_nothing(message) and "empty" in bound.family.sampled_otherwise:
        stop = bound.tokenizer.decode(bound.stop_ids[:1])
        return Said(prompt=prompt, text=stop, history=history, otherwise=True)
    opened, found, rest = marked(_MARK).partition(_MARK)
    if not found:
        return None
    if opened.startswith(prompt):
        text = opened[len(prompt) :] + rest
    elif (closed := _overlap(prompt, rest)) > 0:
        text = rest[closed:]
    else:
        return None
    return Said(prompt=prompt, text=text, history=history, otherwise=True)


def says_nothing(message: Message) -> bool:
    """Whether an assistant's message has no reasoning, no content and no calls."""
    return not any(message.get(key) for key in ("reasoning_content", "content", "tool_calls"))


def _overlap(left: str, right: str) -> int:
    """Length of the longest end of `left` that `right` begins with."""
    return next((size for size in range(min(len(left), len(right)), 0, -1) if left.endswith(right[:size])), 0)


def sampled_ids(bound: BoundFamily, ids: Sequence[int]) -> list[int]:
    """Of the ids of a turn as it is written, those that the model samples: through the token it stops on.

    Where nothing closes a turn, that token is the marker of whoever speaks next.
    """
    last = next((i for i in range(len(ids) - 1, -1, -1) if ids[i] in bound.stop_ids), None)
    if last is not None:
        return list(ids[: last + 1])
    return [*ids, *_role_stops(bound)[:1]]


def other_endings(bound: BoundFamily, sampled: Sequence[int]) -> Iterator[tuple[str, list[int]]]:
    """The same generation as it may have ended otherwise, in words and as ids: these have to join alike."""
    stops = _role_stops(bound)
    if stops and sampled and sampled[-1] in stops:
        for stop in stops[1:]:
            yield f"stopped on {bound.tokenizer.decode([stop])!r}", [*sampled[:-1], stop]
        yield "cut off", list(sampled[:-1])
        return
    end = bound.turn_end_ids
    have = next((k for k in range(len(end), 0, -1) if tuple(sampled[-k:]) == tuple(end[:k])), 0)
    if 0 < have < len(sampled):
        yield "cut off", list(sampled[:-have])


def _role_stops(bound: BoundFamily) -> tuple[int, ...]:
    return bound.tokenizer.ids_of(bound.family.role_stop_tokens, needed_by=f"family {bound.name}")


def writes(bound: BoundFamily, what: str) -> bool:
    """Whether the format has `reasoning`, or `calls`: the family says so, or it shows in what is rendered."""
    parser = bound.family.reasoning_parser if what == "reasoning" else bound.family.tool_call_parser
    if what in bound.reads or parser is not None:
        return True
    message: Message = {"role": "assistant", "content": "x", "reasoning_content": _MARK}
    if what == "calls":
        call = {"id": _MARK, "type": "function", "function": {"name": _MARK, "arguments": "{}"}}
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        return _MARK in bound.render([{"role": "user", "content": "u"}, message], None, None, False)
    except Exception:  # refused, as every trajectory with it will be, with the reason
        return True
