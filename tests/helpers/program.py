"""The command line as a whole: every command, its options, and the flags that built-in plugins add."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterator

import click

from helpers.pages import ROOT
from miles_core import cli
from miles_core.plugins import Registry
from miles_engines.local_server.settings import engine_flags as local_engine_flags
from miles_engines.sglang_server.flags import own_parser


def walk(group: click.Group, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command, by what is typed after the program's name."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from walk(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


(PROGRAM,) = {id(value): value for value in vars(cli).values() if isinstance(value, click.Group)}.values()
COMMANDS = dict(walk(PROGRAM))


def options(command: click.Command) -> list[click.Option]:
    """The options that a command's help shows."""
    return [param for param in command.params if isinstance(param, click.Option) and not param.hidden]


def flags(option: click.Option) -> list[str]:
    """The long names of an option."""
    return [name for name in (*option.opts, *option.secondary_opts) if name.startswith("--")]


def engine_flags() -> set[str]:
    """Flags of the built-in engines, SGLang's own left out."""
    return {flag.split()[0] for flag in local_engine_flags()} | _flags_of(own_parser())


def registered_flags() -> set[str]:
    """Flags that built-in agents and generators register."""
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"]
    parser, registry = argparse.ArgumentParser(add_help=False, conflict_handler="resolve"), Registry.discover()
    for kind, group in (("agent", "miles.agents"), ("generator", "miles.generators")):
        for name in entries[group]:
            plugin = registry.load(kind, f"miles-plugins:{name}")
            if plugin.has("add_arguments"):
                plugin.call("add_arguments", parser)
    return _flags_of(parser)


def _flags_of(parser: argparse.ArgumentParser) -> set[str]:
    shown = (action for action in parser._actions if action.help != argparse.SUPPRESS)
    return {flag for action in shown for flag in action.option_strings if flag.startswith("--")}
