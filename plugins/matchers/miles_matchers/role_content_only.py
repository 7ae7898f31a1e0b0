"""Two messages are the same when role and content are equal.

High risk: tool calls and reasoning do not count, so two turns that say nothing and call different tools are one to
this matcher, and a session can go on from the wrong one. For agents that drop both on the way.
"""

from __future__ import annotations

from collections.abc import Hashable

from miles_core.hookspecs import hookimpl
from miles_core.types import Message
from miles_matchers.strict import key_of, same_keys

KEYS = ("role", "content")


@hookimpl
def message_matches(stored: Message, replayed: Message) -> bool:
    """Equal in role and content; missing, null, `""` and `[]` are one value."""
    return same_keys(stored, replayed, KEYS)


@hookimpl
def message_key(message: Message) -> Hashable:
    """Equal for messages that match, and for no others."""
    return key_of(message, KEYS)
