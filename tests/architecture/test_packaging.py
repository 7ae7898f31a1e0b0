"""What is declared, what is installed and what a wheel holds are the same."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT: dict[str, Any] = PYPROJECT["project"]
PACKAGES = [ROOT / path for path in PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]
PLUGINS = [
    (group, name, target) for group, entries in PROJECT["entry-points"].items() for name, target in entries.items()
]


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that must succeed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} exited with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the tree, with the build backend that is installed here."""
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    (path,) = out.glob("*.whl")
    return path


def test_installed_entry_points_are_the_declared_ones() -> None:
    declared = {(group, name, target) for group, name, target in PLUGINS}
    declared |= {("console_scripts", name, target) for name, target in PROJECT["scripts"].items()}
    installed = {(e.group, e.name, e.value) for e in distribution(PROJECT["name"]).entry_points}
    assert installed == declared, "the install is older than pyproject.toml: pip install -e '.[dev]'"


@pytest.mark.parametrize(("group", "name", "target"), PLUGINS)
def test_one_plugin_is_one_file_of_its_name(group: str, name: str, target: str) -> None:
    module = target.partition(":")[0]
    assert module.rpartition(".")[2] == name, f"{group}: {name} must be a file {name}.py, and its target is {target}"
    paths = [package.parent / module.replace(".", "/") for package in PACKAGES if module.startswith(package.name + ".")]
    files = [file for path in paths for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
    assert files, f"{group}: {name} names {target}, and no file of a shipped package is that module"


def test_every_plugin_folder_is_shipped() -> None:
    folders = {path for path in (ROOT / "plugins").glob("*/miles_*") if path.is_dir()}
    assert folders | {ROOT / "core" / "miles_core"} == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_every_package_is_typed(package: Path) -> None:
    assert (package / "py.typed").is_file()


def test_the_changelog_begins_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    heading = re.search(r"^## \[([^\]]+)\]", text, re.MULTILINE)
    assert heading is not None, "CHANGELOG.md has no heading such as `## [0.1.0] - unreleased`"
    version_file = (ROOT / PYPROJECT["tool"]["hatch"]["version"]["path"]).read_text(encoding="utf-8")
    assert f'__version__ = "{heading[1]}"' in version_file
    assert distribution(PROJECT["name"]).version == heading[1]


def test_a_wheel_holds_data_files_and_no_tests(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    data = {
        path.relative_to(package.parent).as_posix()
        for package in PACKAGES
        for pattern in ("*.jinja", "py.typed", "*.py")
        for path in package.rglob(pattern)
    }
    assert any(name.endswith(".jinja") for name in data), "no template found in the tree"
    assert data <= names
    tops = {name.split("/")[0] for name in names}
    assert tops == {package.name for package in PACKAGES} | {f"miles_plugins-{wheel.name.split('-')[1]}.dist-info"}
    assert not [name for name in names if "/tests/" in name or "__pycache__" in name]
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_a_wheel_works_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env", cwd=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
    run(*pip, "--no-index", "--no-deps", "--disable-pip-version-check", wheel, cwd=tmp_path)
    # The dependencies are the ones installed here. A path named in a .pth file is searched last, and .pth
    # files in it are not read, so the editable install of the checkout is out of reach.
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    dependencies = [path for path in sys.path if path.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(dependencies), encoding="utf-8")

    where = run(python, "-c", "import miles_core; print(miles_core.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(site)
    listed = json.loads(run(python.parent / "miles-plugins", "list", "--json", cwd=tmp_path))
    assert {name for _, name, _ in PLUGINS} <= names_in(listed)


def names_in(value: Any) -> set[str]:
    """Every value of a key `name`, at any depth."""
    if isinstance(value, list):
        return set().union(*map(names_in, value))
    if isinstance(value, dict):
        own = {value["name"]} if isinstance(value.get("name"), str) else set()
        return own.union(*map(names_in, value.values()))
    return set()
