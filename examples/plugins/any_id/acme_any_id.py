"""A matcher for agents built with frameworks that give tool calls ids of their own.

Role, content, reasoning and the calls' names and arguments count as they are; ids, and the id that a tool's result
names, do not. Which result belongs to which call is then told by their order.
"""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]
KEYS = ("role", "content", "reasoning_content")


def same_but_for_ids(stored: Message, replayed: Message) -> bool:
    """Whether two messages differ in ids at most."""
    return _essence(stored) == _essence(replayed)


def _essence(message: Message) -> list[Any]:
    calls = message.get("tool_calls")
    functions = [call.get("function") if isinstance(call, dict) else call for call in calls or []]
    return [*(message.get(key) or None for key in KEYS), functions]
