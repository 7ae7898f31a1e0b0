"""The `miles-plugins` command.

Each command is a module that is imported when it runs; their one-line helps are kept here, so that
`miles-plugins --help` and `list` stay quick. Data goes to stdout, messages to stderr. Exit 0 is success, 1 a
failure, 2 wrong usage, 130 Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from miles_core import MilesError, __version__

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class Lazy(NamedTuple):
    """Where a command is, as `module:attribute`, and its one-line help."""

    target: str
    help: str


COMMANDS: Mapping[str, Lazy] = {
    "list": Lazy("miles_core.cli.list_:command", "List installed plugins and what needs attention."),
    "info": Lazy("miles_core.cli.info:command", "Show what a plugin is, its hooks, docs and options."),
    "check": Lazy("miles_core.cli.check:command", "Load plugins and check that they keep their contracts."),
    "new": Lazy("miles_core.cli.new:command", "Write a new plugin as a package of its own."),
    "serve": Lazy("miles_core.cli.serve:command", "Run the session server."),
    "engine": Lazy("miles_core.cli.engine:command", "Start an engine."),
    "rollout": Lazy("miles_core.cli.rollout:command", "Run an agent over prompts and write samples."),
    "detect": Lazy("miles_core.cli.detect:command", "Say which model family a checkpoint is."),
    "verify": Lazy("miles_core.cli.verify:command", "Prove that a family or a template fits a checkpoint."),
    "inspect": Lazy("miles_core.cli.inspect:command", "Show the tokens, masks and turns of samples."),
    "render": Lazy("miles_core.cli.render:command", "Render messages with a model family's template."),
}
"""Every command, in the order of `--help`."""


class _Failure(click.ClickException):
    """One of our errors, as click reports it."""

    def __init__(self, error: MilesError) -> None:
        super().__init__(error.message)
        self.exit_code = error.exit_code  # type: ignore[misc]  # click declares it on the class


class LazyGroup(click.Group):
    """Imports a command when it is asked for, and turns our errors into messages and exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].target.partition(":")
        found = getattr(import_module(module), attribute)
        assert isinstance(found, click.Command)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            from miles_core.plugins.wording import meant

            close = meant(name, COMMANDS)
            ctx.fail(f"No such command {name!r}." + (f" Did you mean {close!r}?" if close else ""))
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Commands with the helps that are kept here: completing must not import them all."""
        from click.shell_completion import CompletionItem

        found = [CompletionItem(name, help=lazy.help) for name, lazy in COMMANDS.items() if name.startswith(incomplete)]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, lazy.help) for name, lazy in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MilesError as error:
            raise _Failure(error) from error
        except KeyboardInterrupt:
            ctx.exit(130)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(
    __version__, package_name="miles-plugins", prog_name="miles-plugins", message="%(prog)s %(version)s"
)
def main() -> None:
    """Token-exact sessions between chat agents and inference engines."""
