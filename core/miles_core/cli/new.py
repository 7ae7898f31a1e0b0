"""`miles-plugins new`: write a whole, installable plugin package, to be changed into what its author wants."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from string import Template

import click

from miles_core import __version__
from miles_core.cli.output import write
from miles_core.errors import ConfigError
from miles_core.plugins import KINDS, Registry
from miles_core.plugins.selector import NAME, normalized
from miles_core.plugins.wording import a


@dataclass(frozen=True)
class _Sort:
    """What packages of one kind have that others do not."""

    summary: str
    dependencies: tuple[str, ...] = ()
    data: Mapping[str, str] | None = None
    """Files beside the module, and what they are."""


_SORTS: Mapping[str, _Sort] = {
    "family": _Sort("The chat format of a model family.", data={"template.jinja": "the chat template"}),
    "agent": _Sort("An agent that works on samples over the OpenAI chat API.", ("openai>=1.50",)),
    "matcher": _Sort("Says when two messages are the same."),
    "generator": _Sort("Turns a prompt into finished samples.", ("aiohttp>=3.9",)),
    "sample-hook": _Sort("Chooses which branches of a session become samples."),
    "engine": _Sort("Starts what runs the model."),
}


@dataclass(frozen=True)
class Package:
    """The package to write; `files` has its whole content."""

    kind: str
    name: str

    @property
    def distribution(self) -> str:
        """Its name for pip."""
        return normalized(f"miles-{self.kind}-{self.name}").strip("-")

    @property
    def selector(self) -> str:
        """What always chooses the plugin."""
        return f"{self.distribution}:{self.name}"

    @property
    def package(self) -> str:
        """What is imported."""
        return f"miles_{self.module}_{self.name}"

    @property
    def module(self) -> str:
        """The module of the package that has the hooks."""
        return self.kind.replace("-", "_")

    @cached_property
    def files(self) -> dict[str, str]:
        """Text by path."""
        source = f"src/{self.package}"
        sort = _SORTS[self.kind]
        data = {f"{source}/{name}": self._text(f"{self.module}/{name}") for name in sort.data or {}}
        return {
            "pyproject.toml": self._text("common/pyproject.toml"),
            "README.md": self._text("common/README.md"),
            ".gitignore": self._text("common/gitignore"),
            ".github/workflows/test.yml": self._text("common/ci.yml"),
            f"{source}/__init__.py": self._text("common/init.py"),
            f"{source}/py.typed": "",
            f"{source}/{self.module}.py": self._text(f"{self.module}/{self.module}.py"),
            **data,
            f"tests/test_{self.module}.py": self._text(f"{self.module}/test_{self.module}.py"),
        }

    def _text(self, template: str) -> str:
        return Template(_read(template)).substitute(self._values)

    @cached_property
    def _values(self) -> dict[str, str]:
        sort, kind = _SORTS[self.kind], KINDS[self.kind]
        needed = (f"miles-plugins>={__version__}", *sort.dependencies)
        values = {
            "kind": self.kind,
            "name": self.name,
            "dist": self.distribution,
            "package": self.package,
            "module": self.module,
            "group": kind.group,
            "flag": "--pick-samples" if self.kind == "sample-hook" else kind.flag,
            "summary": sort.summary,
            "dependencies": ", ".join(f'"{one}"' for one in needed),
            "rows": "".join(f"| `src/{self.package}/{n}` | {what} |\n" for n, what in (sort.data or {}).items()),
        }
        return {**values, "use": Template(_read(f"{self.module}/use.md")).substitute(values).strip()}


def _read(template: str) -> str:
    return resources.files("miles_core.cli").joinpath("scaffold", f"{template}.in").read_text(encoding="utf-8")


@click.command("new")
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.argument("name")
@click.option("--dir", "directory", type=click.Path(path_type=Path), help="Where to write it; ./NAME by default.")
def command(kind: str, name: str, directory: Path | None) -> None:
    """Write a new plugin as a package: source, tests, README, CI.

    It works as it is written: install it, check it, run its tests, and change it from there. NAME is what the command
    line will choose it by. The folder must be empty, or not there yet.
    """
    _check_name(name)
    target = directory or Path(name)
    _check_directory(target)
    package = Package(kind, name)
    warnings = list(_warnings(package))
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    _write(package, target)
    write("\n".join(_told(package, target, package.selector if warnings else name)))


def _check_name(name: str) -> None:
    if NAME.fullmatch(name):
        return
    guess = re.sub(r"[^a-z0-9_]+", "_", name.lower()).strip("_")
    advice = f"\n  did you mean {guess}?" if guess else ""
    raise ConfigError(f"{name!r} is no plugin name: those have only a-z, 0-9 and _{advice}")


def _check_directory(target: Path) -> None:
    if target.is_dir():
        if any(target.iterdir()):
            raise ConfigError(f"{target} is there already, and not empty\n  name another folder with --dir")
    elif target.exists() or target.is_symlink():
        raise ConfigError(f"{target} is there already, and no folder\n  name another one with --dir")


def _warnings(package: Package) -> Iterator[str]:
    """What will be in the way of the name; nothing of it stops the writing."""
    kind, name, choose = package.kind, package.name, f"{KINDS[package.kind].flag} {package.selector}"
    if kind == "family" and name == "auto":
        yield f"--tito-model auto takes the family that is detected; yours is chosen with {choose}"
    for record in Registry.discover().records:
        if (record.kind, record.name) == (kind, name) and record.distribution != package.distribution:
            outcome = "keeps the bare name" if record.builtin else "has the same name"
            yield f"{record.describe()} is installed and {outcome}; yours is chosen with {choose}"


def _write(package: Package, target: Path) -> None:
    try:
        for path, text in package.files.items():
            file = target / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename or target}: {error.strerror}") from error


def _told(package: Package, target: Path, selector: str) -> Iterator[str]:
    yield f"{package.distribution}, a package with {a(package.kind)}, is in {target}:"
    yield from (f"  {path}" for path in package.files)
    here = str(target) if target.is_absolute() else os.path.join(".", str(target))
    yield "\nIt works as it is. Install it, check it, run its tests:"
    yield f"  pip install -e {shlex.quote(f'{here}[test]')}"
    yield f"  miles-plugins check {selector}"
    yield f"  pytest {shlex.quote(here)}"
