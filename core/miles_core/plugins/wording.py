"""Small pieces of the messages about plugins: the closest name, and a list in words."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def meant(name: str, known: Iterable[str]) -> str | None:
    """The known name that is probably meant by `name`, or None if none is close."""
    close = get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return close[0] if close else None


def listed(names: Iterable[str], last: str = "and") -> str:
    """`a`, `a and b`, or `a, b and c`."""
    items = list(names)
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} {last} {items[-1]}"
