"""Whether a message that was parsed is the one that was rendered, up to what its format does not write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from miles_core.tito.family import TitoFamily
from miles_core.tito.render import parse_arguments
from miles_core.types import Message


def parse_difference(family: TitoFamily, message: Mapping[str, Any], parsed: Message) -> str | None:
    """In words, how `parsed` differs from `message` beyond `family.not_written`; None if it does not."""
    bare = [arguments for _, arguments, _ in _calls(message) if isinstance(arguments, str)]
    if bare and _loses(family, "text_arguments"):
        # Such a call cannot be told from a malformed one; its text has to be there all the same.
        seen = json.dumps([parsed.get("content"), *(arguments for _, arguments, _ in _calls(parsed))])
        lost = next((text for text in bare if json.dumps(text)[1:-1] not in seen), None)
        return None if lost is None else f"the arguments {lost!r} are nowhere in what was read"
    tags = family.parse_facts.reasoning or ()
    if any(tag in _text(message, key) for tag in tags for key in ("reasoning_content", "content")):
        # Text that spells a tag is that tag, so the border between reasoning and content moves.
        texts = [_text(one, "reasoning_content") + _text(one, "content") for one in (message, parsed)]
        want, have = (_squeezed(text, tags) for text in texts)
        return None if want == have else f"the text is {have!r}, expected {want!r}"
    for what, key in (("reasoning", "reasoning_content"), ("content", "content")):
        want, have = _text(message, key), _text(parsed, key)
        if _loses(family, "outer_space"):
            want, have = want.strip(), have.strip()
        if want != have:
            return f"{what} is {have!r}, expected {want!r}"
    want_calls, have_calls = _calls(message), _calls(parsed)
    if len(want_calls) != len(have_calls):
        return f"{len(have_calls)} tool calls, expected {len(want_calls)}"
    pairs = enumerate(zip(want_calls, have_calls, strict=True))
    return next((d for n, (want, have) in pairs if (d := _call_difference(family, n, want, have)) is not None), None)


_Call = tuple[str, Any, Any]


def _call_difference(family: TitoFamily, number: int, want: _Call, have: _Call) -> str | None:
    """How one call differs: name, arguments, id."""
    if want[0] != have[0] and not _loses(family, "call_names"):
        return f"tool call {number} names {have[0]!r}, expected {want[0]!r}"
    same = _alike if _loses(family, "argument_types") else _equal
    if not same(want[1], have[1]):
        return f"tool call {number} has the arguments {have[1]!r}, expected {want[1]!r}"
    if want[2] and want[2] != have[2] and not _loses(family, "call_ids"):
        return f"tool call {number} has the id {have[2]!r}, expected {want[2]!r}"
    return None


def _loses(family: TitoFamily, what: str) -> bool:
    return what in family.not_written


def _text(message: Mapping[str, Any], key: str) -> str:
    value = message.get(key)
    if key == "reasoning_content" and not value:
        value = message.get("reasoning")
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "".join(part if isinstance(part, str) else str(part.get("text") or "") for part in value)
    return value or ""


def _squeezed(text: str, tags: Sequence[str]) -> str:
    """Text without tags and white space."""
    for tag in tags:
        text = text.replace(tag, "")
    return "".join(text.split())


def _calls(message: Mapping[str, Any]) -> list[_Call]:
    """Name, arguments (an object, or the text they are) and id of each call."""
    out = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        out.append((function["name"], parse_arguments(function.get("arguments")), call.get("id")))
    return out


def _equal(want: Any, have: Any) -> bool:
    """Equality of JSON values, in which true is not 1 and 1 is not 1.0."""
    return _written(want) == _written(have)


def _alike(want: Any, have: Any) -> bool:
    """Equality of the text that values are written as, where the format does not say what is a string."""
    if not isinstance(want, dict) or not isinstance(have, dict) or want.keys() != have.keys():
        return _equal(want, have)
    return all(_bare(value) == _bare(have[key]) for key, value in want.items())


def _bare(value: Any) -> str:
    return value.strip() if isinstance(value, str) else _written(value)


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
