"""Flags that the chosen plugins register themselves: parsed from what click left over, and shown in `--help`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import click

from miles_core.cli.engine_flags import refuse
from miles_core.errors import ConfigError, MilesError
from miles_core.plugins import Plugin, Registry


def parse_plugin_flags(
    plugins: Sequence[Plugin], extra: Sequence[str], *, for_engine: bool = False
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The values of all flags that `plugins` register, by attribute, and the words that nobody registered.

    Those are wrong use unless they may be `for_engine`. Raises ConfigError where two plugins register one flag.
    """
    parser = argparse.ArgumentParser(prog="miles-plugins", add_help=False, exit_on_error=False, allow_abbrev=False)
    for plugin in plugins:
        if plugin.has("add_arguments"):
            _register(plugin, parser)
    whose = " and ".join(plugin.describe() for plugin in plugins)
    try:
        values, unknown = parser.parse_known_args(list(extra))
    except argparse.ArgumentError as error:
        raise click.UsageError(f"{whose}: {error}") from error
    except SystemExit as error:  # a required flag that is missing, before Python 3.12
        raise click.UsageError(f"{whose}: a flag of it is missing or wrong, see --help") from error
    if unknown and not for_engine:
        refuse(unknown[0], [name for action in parser._actions for name in action.option_strings])
    return vars(values), tuple(unknown)


def _register(plugin: Plugin, parser: argparse.ArgumentParser) -> None:
    with plugin.guard("add_arguments"):
        try:
            plugin.hook("add_arguments")(parser)
        except argparse.ArgumentError as error:
            raise ConfigError(f"{plugin.describe()} registers a flag that another plugin has: {error}") from error


class CommandWithPluginFlags(click.Command):
    """A command whose `--help` also shows the flags of the plugins that stand beside it on the command line.

    `plugin_options` are the names of the options that choose a plugin, each with its kind.
    """

    plugin_options: ClassVar[Mapping[str, str]] = {}
    _WORDS = "miles_core.cli.words"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the words for the help, which click asks for before it has parsed the rest."""
        ctx.meta[self._WORDS] = list(args)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The command's own options, then a section for each chosen plugin that has flags."""
        super().format_options(ctx, formatter)
        registry: Registry | None = None
        for param in self.params:
            kind = self.plugin_options.get(param.name or "")
            if kind is None:
                continue
            given = self.words(ctx, *param.opts) or ([param.default] if isinstance(param.default, str) else [])
            if given:
                registry = registry or Registry.discover()
                self._section(registry, kind, self.selector(ctx, kind, given[-1]), formatter)

    def words(self, ctx: click.Context, *names: str) -> list[str]:
        """What the options of these names were given."""
        words: list[str] = ctx.meta.get(self._WORDS, [])
        found = []
        for at, word in enumerate(words):
            name, equals, value = word.partition("=")
            if name in names and (equals or at + 1 < len(words)):
                found.append(value if equals else words[at + 1])
        return found

    def selector(self, ctx: click.Context, kind: str, name: str) -> str:
        """The plugin that a name on the command line means."""
        return name

    def _section(self, registry: Registry, kind: str, selector: str, formatter: click.HelpFormatter) -> None:
        """The flags of one plugin; one that cannot be loaded is named with the reason."""
        try:
            plugin = registry.load(kind, selector)
            rows = flags_of(plugin)
        except MilesError as error:
            with formatter.section(f"Flags of {kind} {selector}"):
                formatter.write_text(f"cannot be shown: {error.message}")
            return
        if rows:
            with formatter.section(f"Flags of {plugin.describe()}"):
                formatter.write_dl(rows)


def flags_of(plugin: Plugin) -> list[tuple[str, str]]:
    """Each flag that the plugin registers, as help shows it, and its text with the default."""
    if not plugin.has("add_arguments"):
        return []
    parser = argparse.ArgumentParser(add_help=False)
    plugin.call("add_arguments", parser)
    return [(_invocation(action), _text(action)) for action in parser._actions]


def _invocation(action: argparse.Action) -> str:
    names = ", ".join(action.option_strings) or action.dest
    if action.nargs == 0 or not action.option_strings:
        return names
    metavar = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    return f"{names} {metavar if isinstance(metavar, str) else ' '.join(metavar)}"


def _text(action: argparse.Action) -> str:
    text = action.help if action.help and action.help is not argparse.SUPPRESS else ""
    if action.default in (None, argparse.SUPPRESS) or action.nargs == 0:
        return text
    return f"{text}  [default: {action.default}]".strip()
