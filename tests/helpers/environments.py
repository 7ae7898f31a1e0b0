"""Real environments: wheels built here, installed in a virtual environment that lends the libraries of this one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

LIBRARIES = [path for path in sys.path if path.endswith("site-packages")]


def run(*command: str | Path, cwd: Path, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command without what this process sets for Python and for the program."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MILES_", "PYTHON"))}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **(environ or {})},
        capture_output=True,
        text=True,
        timeout=240,
    )


def build_wheel(source: Path, out: Path) -> Path:
    """The wheel of a package's folder, by the build backend that is installed here."""
    before = set(out.glob("*.whl"))
    done = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source, cwd=source)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = set(out.glob("*.whl")) - before
    return wheel


@dataclass(frozen=True)
class Environment:
    """A virtual environment; only what is installed into it has plugins."""

    path: Path

    @classmethod
    def make(cls, path: Path) -> Environment:
        """An empty one. A path named in a .pth file is searched last, and .pth files in it are not read, so that an
        editable install of the checkout is out of reach."""
        done = run(sys.executable, "-m", "venv", "--without-pip", path, cwd=path.parent)
        assert done.returncode == 0, done.stderr
        made = cls(path)
        (made.site / "libraries.pth").write_text("\n".join(LIBRARIES), encoding="utf-8")
        return made

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.path / "bin" / "python"

    @property
    def site(self) -> Path:
        """Where packages go."""
        (found,) = (self.path / "lib").glob("python*/site-packages")
        return found

    def install(self, *what: str | Path, editable: bool = False) -> None:
        """Install wheels or folders, without their dependencies and without an index."""
        pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet"]
        options = ["--no-index", "--no-deps", "--no-build-isolation", "--no-warn-script-location"]
        targets: list[str | Path] = [part for each in what for part in (["--editable", each] if editable else [each])]
        done = run(*pip, *options, *targets, cwd=self.path)
        assert done.returncode == 0, done.stdout + done.stderr

    def miles(
        self, *arguments: str | Path, cwd: Path | None = None, environ: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run its `miles-plugins`."""
        return run(self.path / "bin" / "miles-plugins", *arguments, cwd=cwd or self.path, environ=environ)

    def pytest(self, folder: Path) -> subprocess.CompletedProcess[str]:
        """Run the tests in a folder, as its author would, apart from pytest's cache."""
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--import-mode=importlib"]
        return run(self.python, "-m", "pytest", *options, "-c", folder / "pyproject.toml", folder, cwd=folder)


def packages(folder: Path) -> Iterable[Path]:
    """The package folders in a folder."""
    return sorted(file.parent for file in folder.glob("*/pyproject.toml"))


@dataclass(frozen=True)
class Installed:
    """An environment, and the folders of what is in it: by kind what `new` wrote, by name the examples."""

    env: Environment
    new: dict[str, Path]
    examples: dict[str, Path]
