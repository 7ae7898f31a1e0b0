"""Every command, flag, hook, error and plugin stands in the documentation."""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path

import click
import pytest

from miles_core import cli, errors, hookspecs

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
TEXT = "\n".join(PAGES.values())

ERRORS = [
    value
    for _, value in inspect.getmembers(errors, inspect.isclass)
    if issubclass(value, errors.MilesError) and value.__module__ == errors.__name__
]
HOOKS = [name for name, value in vars(hookspecs).items() if hasattr(value, f"{hookspecs.PROJECT}_spec")]
PLUGINS = [
    name
    for entries in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "entry-points"
    ].values()
    for name in entries
]


def commands() -> dict[str, click.Command]:
    """Every command of the program, by what is typed after its name."""
    (program,) = {id(g): g for g in vars(cli).values() if isinstance(g, click.Group)}.values()
    return dict(walk(program, ""))


def walk(group: click.Group, prefix: str) -> list[tuple[str, click.Command]]:
    context = click.Context(group)
    found = []
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            found += walk(command, f"{prefix}{name} ")
        else:
            found.append((f"{prefix}{name}", command))
    return found


def test_every_command_and_flag_is_documented() -> None:
    page = PAGES["docs/cli.md"]
    missing = []
    for name, command in commands().items():
        section = re.search(rf"^## `{re.escape(name)}\b.*?(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
        if section is None:
            missing.append(f"docs/cli.md has no heading `## \u0060{name}\u0060`")
            continue
        flags = {flag for param in command.params for flag in (*param.opts, *param.secondary_opts) if flag[:2] == "--"}
        known = set(re.findall(r"--[a-z0-9-]+", section[0]))
        missing += [f"docs/cli.md does not name {flag} under {name}" for flag in sorted(flags - known)]
    assert not missing, "\n" + "\n".join(missing)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_every_error_is_documented_with_its_status(error: type[errors.MilesError]) -> None:
    row = re.search(rf"^\| `{error.__name__}` \| ([^|]*)\|", PAGES["docs/errors.md"], re.MULTILINE)
    assert row is not None, f"docs/errors.md has no row for {error.__name__}"
    assert str(error.status) in row[1]


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_is_documented(name: str) -> None:
    assert re.search(rf"^## `{name}`", PAGES["docs/hooks.md"], re.MULTILINE)


@pytest.mark.parametrize("name", PLUGINS)
def test_every_plugin_is_documented(name: str) -> None:
    assert f"`{name}`" in TEXT, f"neither README.md nor docs/ name the plugin {name}"


def test_links_between_pages_lead_somewhere() -> None:
    broken = [
        f"{page}: {link}"
        for page, text in PAGES.items()
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
        if not (ROOT / page).parent.joinpath(link).exists()
    ]
    assert not broken, "\n" + "\n".join(broken)
