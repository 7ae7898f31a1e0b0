"""Flags that a command passes on to an engine that it starts, and what such an engine must give back."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from miles_core.errors import ConfigError

if TYPE_CHECKING:
    from miles_core.engine.base import Engine


def check_engine_flags(engines: Sequence[str], words: Sequence[str]) -> None:
    """Raise UsageError for words that no flag of ours took, unless an engine is started, which may know them."""
    if words and all("://" in engine for engine in engines):
        refuse(words[0])


def refuse(word: str, known: Sequence[str] = ()) -> None:
    """Raise UsageError for a word that nobody knows, with the nearest of the command's flags and of `known`."""
    if not word.startswith("-"):
        raise click.UsageError(f"Got unexpected extra argument ({word})")
    ctx = click.get_current_context(silent=True)
    names = [name for param in ctx.command.params for name in param.opts] if ctx else []
    name = word.partition("=")[0]
    raise click.NoSuchOption(name, possibilities=difflib.get_close_matches(name, [*names, *known]))


def serving_urls(name: str, engine: Engine) -> tuple[str, ...]:
    """The engine's URLs. Raises ConfigError where it has none, as the second of two nodes."""
    urls = tuple(engine.urls)
    if not urls:
        raise ConfigError(
            f"--engine {name}: it serves no requests here, as part of an engine on several nodes; keep it running with "
            "miles-plugins engine, and give the URL of the first node's"
        )
    return urls
