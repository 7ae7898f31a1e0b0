"""Checks of message matchers: synchronous, a bool, reflexive, and without a trace on its arguments."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping

from miles_core.plugins import Plugin
from miles_core.testing.conformance.report import CheckFunction, Skip
from miles_core.types import Message

_CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": [2.0]}'}}

MESSAGES: tuple[Message, ...] = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1 + 2?"},
    {"role": "user", "content": [{"type": "text", "text": "naïve 数 🙂"}]},
    {"role": "user", "content": ""},
    {"role": "assistant", "content": "3"},
    {"role": "assistant", "content": "3", "reasoning_content": "One and two."},
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "assistant", "content": "", "tool_calls": [{**_CALL, "index": 0}]},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{**_CALL, "function": {"name": "add", "arguments": "{"}}],
    },
    {"role": "tool", "content": "3", "tool_call_id": "call_1"},
    {"role": "tool", "content": "3", "name": "add", "custom": {"nested": [None, True]}},
)
"""Messages of every role, as agents send them: parts, nulls, calls with an index, broken arguments."""


def _pairs() -> Iterator[tuple[Message, Message]]:
    return ((copy.deepcopy(a), copy.deepcopy(b)) for a in MESSAGES for b in MESSAGES)


def answers_with_a_bool(plugin: Plugin) -> str | None:
    """Every pair of messages gets True or False; anything else would fail the request."""
    for stored, replayed in _pairs():
        answer = plugin.call("message_matches", stored, replayed)
        if not isinstance(answer, bool):
            return f"answered {answer!r} for {stored} and {replayed}; return True or False"
    return None


def is_reflexive(plugin: Plugin) -> str | None:
    """A message sent back as it is stored is the stored one; otherwise no history would ever be extended."""
    for message in MESSAGES:
        if plugin.call("message_matches", copy.deepcopy(message), copy.deepcopy(message)) is not True:
            return f"does not match a message with itself: {message}"
    return None


def leaves_its_arguments(plugin: Plugin) -> str | None:
    """The stored message is what the session keeps: comparing must not change it."""
    for stored, replayed in _pairs():
        before = copy.deepcopy((stored, replayed))
        plugin.call("message_matches", stored, replayed)
        if (stored, replayed) != before:
            return f"changed its arguments from {before} to {(stored, replayed)}"
    return None


def answers_alike(plugin: Plugin) -> str | None:
    """The same two messages get the same answer, whatever was asked before: a session asks again and again."""
    first = [plugin.call("message_matches", stored, replayed) for stored, replayed in _pairs()]
    again = [plugin.call("message_matches", stored, replayed) for stored, replayed in reversed(list(_pairs()))]
    for (stored, replayed), one, other in zip(_pairs(), first, reversed(again), strict=True):
        if one != other:
            return f"answered {one}, then {other}, for {stored} and {replayed}"
    return None


def sorts_by_a_key(plugin: Plugin) -> str | Skip | None:
    """Messages that match have equal keys, or a tree would not find the stored one."""
    if not plugin.has("message_key"):
        return Skip("has no message_key, so a tree asks about every branch")
    for stored, replayed in _pairs():
        before = copy.deepcopy((stored, replayed))
        keys = [plugin.call("message_key", message) for message in (stored, replayed)]
        if (stored, replayed) != before:
            return f"message_key changed a message from {before} to {(stored, replayed)}"
        hash(keys[0])
        if keys[0] != keys[1] and plugin.call("message_matches", stored, replayed) is True:
            return f"matches {stored} and {replayed}, whose keys {keys[0]!r} and {keys[1]!r} differ"
    return None


CHECKS: Mapping[str, CheckFunction] = {
    "answers with a bool": answers_with_a_bool,
    "is reflexive": is_reflexive,
    "leaves its arguments": leaves_its_arguments,
    "answers alike": answers_alike,
    "sorts by a key": sorts_by_a_key,
}
OPTIONAL = frozenset({"sorts by a key"})
