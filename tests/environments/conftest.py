"""One environment for all tests here: this project, what `new` writes, and the examples, each as a wheel."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from helpers.distributions import ROOT
from helpers.environments import Environment, Installed, build_wheel, packages
from miles_core.plugins import KINDS

EXAMPLES = ROOT / "examples" / "plugins"


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This project's."""
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The environment, made once."""
    work = tmp_path_factory.mktemp("packages")
    env, wheels = Environment.make(work / "env"), work / "wheels"
    wheels.mkdir()
    env.install(wheel)
    new = {kind: work / "new" / kind for kind in KINDS}
    for kind, folder in new.items():
        done = env.miles("new", kind, f"zz_{kind.replace('-', '_')}", "--dir", folder)
        assert done.returncode == 0, done.stderr
    # copies: a build leaves things behind in its folder
    shutil.copytree(EXAMPLES, work / "examples", ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    examples = {folder.name: folder for folder in packages(work / "examples")}
    env.install(*(build_wheel(folder, wheels) for folder in (*new.values(), *examples.values())))
    return Installed(env, new, examples)
