"""How a plugin is named on the command line: `name`, `dist:name`, `name@revision`, or a dotted path."""

from __future__ import annotations

import re
from dataclasses import dataclass

from miles_core.errors import ConfigError

NAME = re.compile(r"[a-z0-9_]+")
"""What a plugin's name is made of."""


def normalized(distribution: str) -> str:
    """The name of a distribution as PEP 503 spells it, so that `Acme_Agents` and `acme-agents` are one."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


@dataclass(frozen=True)
class Selector:
    """A parsed selector; for a dotted path, `name` is the path and `dotted` is true."""

    raw: str
    name: str
    dist: str | None = None
    revision: str | None = None
    dotted: bool = False

    @classmethod
    def parse(cls, text: str) -> Selector:
        """Split `text` at `@` first, then `:`, then `.`; raise ConfigError if a part is malformed."""
        rest, at, revision = text.strip().partition("@")
        if at and not revision:
            raise ConfigError(f"the revision after '@' in {text!r} is empty\n  write name@revision, or name alone")
        dist, colon, name = rest.rpartition(":")
        if colon:
            return cls(text, _name(name, text), _distribution(dist, text), revision or None)
        if "." in rest:
            return cls(text, _path(rest, text), None, revision or None, dotted=True)
        return cls(text, _name(rest, text), None, revision or None)


def _name(name: str, text: str) -> str:
    if NAME.fullmatch(name):
        return name
    if not name:
        raise ConfigError(f"{text!r} names no plugin\n  write a name, distribution:name, or a dotted path")
    guess = re.sub(r"[^a-z0-9_]+", "_", name.lower()).strip("_")
    advice = f"did you mean {guess}?" if guess else "miles-plugins list shows the names"
    raise ConfigError(f"{name!r} is no plugin name: those have only a-z, 0-9 and _\n  {advice}")


def _distribution(dist: str, text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", dist):
        raise ConfigError(
            f"{dist!r} in {text!r} is no distribution name\n  write distribution:name, as list shows them"
        )
    return normalized(dist)


def _path(path: str, text: str) -> str:
    if not all(part.isidentifier() for part in path.split(".")):
        raise ConfigError(
            f"{text!r} is neither a plugin name nor a dotted path\n"
            "  write a path such as my_package.my_module.my_function"
        )
    return path
