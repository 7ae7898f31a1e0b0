"""Matchers that break their contract, given to servers by dotted path."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import Any

from miles_core.errors import HistoryError


def raises(stored: dict[str, Any], replayed: dict[str, Any]) -> bool:
    """Fails whenever it is asked."""
    raise ValueError("no opinion")


def answers_one(stored: dict[str, Any], replayed: dict[str, Any]) -> bool:
    """Gives a number for an answer."""
    return 1  # type: ignore[return-value]  # that is its fault


def answers_nothing(stored: dict[str, Any], replayed: dict[str, Any]) -> bool:
    """Forgets to answer."""
    return None  # type: ignore[return-value]  # that is its fault


def raises_ours(stored: dict[str, Any], replayed: dict[str, Any]) -> bool:
    """Raises an error that would be the agent's, were it ours."""
    raise HistoryError("not this one")


def leaves(stored: dict[str, Any], replayed: dict[str, Any]) -> bool:
    """Ends the program."""
    sys.exit(3)


def answers_later(stored: dict[str, Any], replayed: dict[str, Any]) -> bool:
    """Looks synchronous, and gives a coroutine."""

    async def later() -> bool:
        return True

    return later()  # type: ignore[return-value]  # that is its fault


async def asynchronous(stored: dict[str, Any], replayed: dict[str, Any]) -> bool:
    """Cannot be called without await."""
    return True


class UnhashableKey:
    """Its keys cannot be looked up."""

    def message_matches(self, stored: dict[str, Any], replayed: dict[str, Any]) -> bool:
        """As it should be."""
        return stored == replayed

    def message_key(self, message: dict[str, Any]) -> Hashable:
        """A dict."""
        return message  # type: ignore[return-value]  # that is its fault


class RaisingKey(UnhashableKey):
    """It has no keys."""

    def message_key(self, message: dict[str, Any]) -> Hashable:
        """Fails."""
        raise KeyError("no key")
