"""What a new generation shares with those beside it: equal parts of a session's generations are one object.

Agents send the same tools with every turn, and the same messages with every attempt at a place. A node holds only
what is new in it, so what is equal, down to the spelling, is kept once.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from miles_core.session.tree import Forest, Node
from miles_core.types import Message


def beside(forest: Forest, base: Node | None) -> list[Node]:
    """The generations that a new one behind `base` is likely to repeat: `base`, and the last attempt at its place."""
    attempts = forest.children(base)
    return [node for node in (base, attempts[-1] if attempts else None) if node is not None]


def shared_fields(fields: Mapping[str, Any], near: Sequence[Node]) -> dict[str, Any]:
    """The fields of a request, those that `near` ones have too being theirs."""
    out = dict(fields)
    for key, value in fields.items():
        if isinstance(value, (dict, list)):
            out[key] = next((node.request[key] for node in near if spelled_alike(node.request.get(key), value)), value)
    return out


def shared_messages(messages: Sequence[Message], near: Sequence[Node]) -> tuple[Message, ...]:
    """New messages, those that a generation `near` has at the same place being its."""
    out = list(messages)
    for node in near:
        for at, (known, message) in enumerate(zip(node.messages, out, strict=False)):
            if spelled_alike(known, message):
                out[at] = known
    return tuple(out)


def shared_ids(ids: array[int], near: Sequence[Node]) -> array[int]:
    """New ids of a prompt, or the equal ones that a generation `near` has."""
    return next((node.added for node in near if node.added == ids), ids)


def spelled_alike(left: Any, right: Any) -> bool:
    """Whether two JSON values are written alike, the order of keys included; `==` alone would take true for 1."""
    return left is right or (left == right and orjson.dumps(left) == orjson.dumps(right))
