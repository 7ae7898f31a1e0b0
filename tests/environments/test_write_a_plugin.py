"""The tutorial, followed: every command of `docs/write_a_plugin.md` is run, every file in it written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.distributions import ROOT
from helpers.environments import Environment
from helpers.pages import blocks_of
from miles_core.plugins import KINDS
from miles_core.testing import conformance

PAGE = (ROOT / "docs" / "write_a_plugin.md").read_text(encoding="utf-8")
MODEL = ROOT / "examples" / "tiny" / "model"

# pip without its index and without a build environment, which would be downloaded; else as a reader has it
PIP = """#!/bin/sh
command=$1; shift
exec {python} -m pip "$command" --quiet --no-index --no-deps --no-build-isolation --no-warn-script-location "$@"
"""
PYTEST = '#!/bin/sh\nexec {python} -m pytest -q -p no:cacheprovider "$@"\n'


BLOCKS = list(blocks_of(ROOT / "docs" / "write_a_plugin.md"))


def test_every_block_is_run_or_written() -> None:
    assert BLOCKS
    assert all(block.language == "bash" or block.title for block in BLOCKS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_check_of_a_kind_is_in_the_table(kind: str) -> None:
    (row,) = re.findall(rf"^\| {kind} \| (.*?) \|$", PAGE.partition("| kind | checks |")[2], re.MULTILINE)
    names = conformance.names_of(kind).items()
    assert row == ", ".join(name if required else f"{name} (optional)" for name, required in names)


@pytest.mark.slow
def test_a_newcomer_gets_through_with_this_page_alone(wheel: Path, tmp_path: Path) -> None:
    env = Environment.make(tmp_path / "env")
    env.install(wheel)
    for name, script in (("pip", PIP), ("pytest", PYTEST)):
        program = env.path / "bin" / name
        program.write_text(script.format(python=env.python))
        program.chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    for block in BLOCKS:
        if block.title:
            (work / block.title).write_text(block.text, encoding="utf-8")
            continue
        commands = block.text.replace("--checkpoint DIR", f"--checkpoint {MODEL}")
        path = f"{env.path / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin"
        done = subprocess.run(
            ["bash", "-eu", "-c", commands], cwd=work, env={"PATH": path, "HOME": str(tmp_path)},
            capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
