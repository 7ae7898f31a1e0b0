"""`miles-plugins new`: what it writes, and what it refuses. Whether that works is in `tests/environments`."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from helpers.distributions import ROOT, Site, distribution
from miles_core import __version__
from miles_core.plugins import KINDS

LINT = ["--config", str(ROOT / "pyproject.toml"), "--config", 'src=["src"]', "."]


@pytest.mark.parametrize("kind", KINDS)
def test_a_package_has_all_that_it_needs(site: Site, tmp_path: Path, kind: str) -> None:
    result = site.run("new", kind, "zz_mine", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    written = tmp_path / "zz_mine"
    files = {file.relative_to(written).as_posix() for file in written.rglob("*") if file.is_file()}
    module = kind.replace("-", "_")
    source = f"src/miles_{module}_zz_mine"
    assert files >= {"README.md", ".gitignore", ".github/workflows/test.yml", f"tests/test_{module}.py"}
    assert files >= {f"{source}/__init__.py", f"{source}/py.typed", f"{source}/{module}.py"}
    assert {line.strip() for line in result.stdout.splitlines()} >= files
    project = tomllib.loads((written / "pyproject.toml").read_text())["project"]
    assert project["entry-points"] == {KINDS[kind].group: {"zz_mine": f"miles_{module}_zz_mine.{module}"}}
    assert f"miles-plugins>={__version__}" in project["dependencies"]
    assert "$" not in "".join(file.read_text() for file in written.rglob("*.[pt]*") if file.is_file())


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_writes_passes_our_own_lint(site: Site, tmp_path: Path, kind: str) -> None:
    site.run("new", kind, "zz_mine", cwd=tmp_path)
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, *LINT]
        done = subprocess.run(ruff, cwd=tmp_path / "zz_mine", capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_what_to_do_next_is_told(site: Site, tmp_path: Path) -> None:
    result = site.run("new", "agent", "zz_mine", "--dir", "my agent", cwd=tmp_path)
    assert result.stdout.startswith("miles-agent-zz-mine, a package with an agent, is in my agent:\n  pyproject.toml\n")
    assert result.stdout.endswith(
        "\nIt works as it is. Install it, check it, run its tests:\n"
        "  pip install -e './my agent[test]'\n"
        "  miles-plugins check zz_mine\n"
        "  pytest './my agent'\n"
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("My-Agent", "'My-Agent' is no plugin name: those have only a-z, 0-9 and _\n  did you mean my_agent?"),
        ("数", "'数' is no plugin name: those have only a-z, 0-9 and _"),
        ("", "'' is no plugin name: those have only a-z, 0-9 and _"),
        ("../x", "'../x' is no plugin name: those have only a-z, 0-9 and _\n  did you mean x?"),
    ],
)
def test_a_name_that_cannot_be_chosen_is_refused(site: Site, tmp_path: Path, name: str, message: str) -> None:
    work = tmp_path / "work"
    work.mkdir()
    result = site.run("new", "agent", name, cwd=work)
    assert (result.returncode, result.stdout, result.stderr) == (2, "", f"Error: {message}\n")
    assert not any(work.iterdir())


def test_a_kind_that_is_none_is_wrong_usage(site: Site, tmp_path: Path) -> None:
    result = site.run("new", "families", "x", cwd=tmp_path)
    assert result.returncode == 2
    assert "'families' is not one of 'family', 'agent'" in result.stderr


def test_nothing_is_overwritten(site: Site, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "notes").write_text("mine")
    result = site.run("new", "agent", "x", "--dir", "there", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (
        2,
        "Error: there is there already, and not empty\n  name another folder with --dir\n",
    )
    assert [file.name for file in there.iterdir()] == ["notes"]
    file = site.run("new", "agent", "x", "--dir", "there/notes", cwd=tmp_path)
    assert (file.returncode, file.stderr) == (
        2,
        "Error: there/notes is there already, and no folder\n  name another one with --dir\n",
    )


def test_an_empty_folder_is_filled(site: Site, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert site.run("new", "matcher", "x", "--dir", "empty", cwd=tmp_path).returncode == 0
    assert (tmp_path / "empty" / "pyproject.toml").is_file()


def test_a_folder_that_cannot_be_written_is_named(site: Site, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = site.run("new", "matcher", "x", "--dir", "file/inside", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: cannot write file/inside")


def test_a_name_that_is_taken_is_warned_of(site: Site, tmp_path: Path) -> None:
    distribution(site.path, "miles-plugins", "0.1.0", agents={"calculator": "miles_agents.calculator"})
    distribution(site.path, "zz-a", agents={"other": "zz_a"})
    result = site.run("new", "agent", "calculator", cwd=tmp_path)
    assert result.returncode == 0
    assert result.stderr == (
        "warning: agent calculator of miles-plugins 0.1.0 is installed and keeps the bare name; "
        "yours is chosen with --agent miles-agent-calculator:calculator\n"
    )
    assert "\n  miles-plugins check miles-agent-calculator:calculator\n" in result.stdout
    assert "is installed and has the same name" in site.run("new", "agent", "other", cwd=tmp_path).stderr
    assert site.run("new", "matcher", "calculator", "--dir", "m", cwd=tmp_path).stderr == ""


def test_a_family_named_auto_is_warned_of(site: Site, tmp_path: Path) -> None:
    result = site.run("new", "family", "auto", cwd=tmp_path)
    assert result.returncode == 0
    assert "--tito-model auto takes the family that is detected" in result.stderr


def test_a_package_that_is_installed_already_is_not_in_its_own_way(site: Site, tmp_path: Path) -> None:
    distribution(site.path, "miles-agent-mine", agents={"mine": "zz_a"})
    assert site.run("new", "agent", "mine", cwd=tmp_path).stderr == ""
