"""What `miles-plugins new` writes works at once: built, installed, listed, checked, its own tests run."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from helpers.distributions import ROOT
from helpers.environments import Environment, Installed, packages, run
from miles_core.plugins import KINDS

pytestmark = pytest.mark.slow


def name_of(kind: str) -> str:
    return f"zz_{kind.replace('-', '_')}"


def test_all_are_listed_without_anything_to_attend_to(installed: Installed) -> None:
    listed = json.loads(installed.env.miles("list", "--json").stdout)
    assert listed["problems"] == []
    assert {plugin["state"] for plugin in listed["plugins"]} == {"found"}
    assert {(kind, name_of(kind)) for kind in KINDS} <= {(p["kind"], p["name"]) for p in listed["plugins"]}


def test_all_pass_check(installed: Installed) -> None:
    done = installed.env.miles("check", *map(name_of, KINDS))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("6 plugins checked, none failed\n")


@pytest.mark.parametrize("kind", KINDS)
def test_its_own_tests_pass(installed: Installed, kind: str) -> None:
    done = installed.env.pytest(installed.new[kind])
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_new_family_fits_a_checkpoint_with_its_tokens(installed: Installed) -> None:
    model = ROOT / "examples" / "tiny" / "model"
    done = installed.env.miles("verify", "template", "--checkpoint", model, "--tito-model", "zz_family")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nPASS: " in done.stdout


def test_sources_are_typed(installed: Installed) -> None:
    sources = [folder / "src" for folder in installed.new.values()]
    sources += list(packages(ROOT / "examples" / "plugins"))
    options = ["--config-file", ROOT / "pyproject.toml", "--cache-dir", ROOT / ".mypy_cache"]
    paths = ":".join(map(str, [ROOT / "core", *sources]))
    files = [file for source in sources for file in source.rglob("*.py")]
    done = run(sys.executable, "-m", "mypy", *options, *files, cwd=ROOT, environ={"MYPYPATH": paths})
    assert done.returncode == 0, done.stdout


def test_an_installed_folder_works_from_its_own_folder(installed: Installed, wheel: Path, tmp_path: Path) -> None:
    env = Environment.make(tmp_path / "env")
    env.install(wheel)
    assert env.miles("new", "matcher", "1st", "--dir", tmp_path / "mine").returncode == 0
    env.install(tmp_path / "mine")
    # setuptools leaves its .egg-info in the folder, which is then first on the path of `python -m`
    shutil.copytree(installed.examples["any_id"], tmp_path / "any_id")
    env.install(tmp_path / "any_id", editable=True)
    assert list((tmp_path / "any_id").glob("*.egg-info"))
    lists = [run(env.python, "-m", "miles_core", "list", cwd=place) for place in (tmp_path / "any_id", tmp_path)]
    assert lists[0].stdout == lists[1].stdout
    assert [lists[0].stdout.count(name) for name in ("  any_id  ", "  1st  ", "attention")] == [1, 1, 0]
    for place in (tmp_path / "mine", tmp_path / "any_id", tmp_path):
        done = run(env.python, "-m", "miles_core", "check", "1st", "any_id", cwd=place)
        assert done.returncode == 0, done.stdout + done.stderr
