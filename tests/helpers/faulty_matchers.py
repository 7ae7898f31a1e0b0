"""Matchers that break their contract, given to servers by dotted path."""

from __future__ import annotations

from typing import Any


def raises(stored: dict[str, Any], replayed: dict[str, Any]) -> bool:
    """Fails whenever it is asked."""
    raise ValueError("no opinion")


def answers_one(stored: dict[str, Any], replayed: dict[str, Any]) -> bool:
    """Gives a number for an answer."""
    return 1  # type: ignore[return-value]  # that is its fault
