"""The `miles-plugins` command itself: help, version, exit codes."""

from __future__ import annotations

import click
import pytest

from helpers.distributions import Site
from miles_core import __version__
from miles_core.cli import COMMANDS, main


def test_help_shows_every_command_with_its_one_line_help(site: Site) -> None:
    result = site.run("--help")
    assert (result.returncode, result.stderr) == (0, "")
    for name, lazy in COMMANDS.items():
        assert f"  {name.ljust(8)} {lazy.help}"[:70] in result.stdout


def test_version(site: Site) -> None:
    assert site.run("--version").stdout == f"miles-plugins {__version__}\n"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (("lst",), "Error: No such command 'lst'. Did you mean 'list'?"),
        (("verfy", "template"), "Error: No such command 'verfy'. Did you mean 'verify'?"),
        (("xyzzy",), "Error: No such command 'xyzzy'."),
    ],
)
def test_an_unknown_command_is_wrong_usage_and_says_which_was_meant(
    site: Site, typed: tuple[str, ...], message: str
) -> None:
    result = site.run(*typed)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1] == message


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_where_the_table_says(name: str) -> None:
    context = click.Context(main)
    assert isinstance(main.get_command(context, name), click.Command)
