"""Small pieces of the messages about plugins: the closest name, and a list in words."""

from __future__ import annotations

from collections.abc import Iterable


def meant(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that is probably meant by `name`, or None if none is close."""
    from difflib import get_close_matches  # here, since it is rarely needed

    close = get_close_matches(name, sorted(known), n=1, cutoff=cutoff)
    return close[0] if close else None


def listed(names: Iterable[str], last: str = "and", most: int | None = None) -> str:
    """`a`, `a and b`, or `a, b and c`; with `most`, the rest is only counted: `a, b and 7 more`."""
    items = list(names)
    if most is not None and len(items) > most + 1:
        items = [*items[:most], f"{len(items) - most} more"]
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} {last} {items[-1]}"


def a(noun: str) -> str:
    """The noun with its indefinite article: `an agent`, `a family`."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
