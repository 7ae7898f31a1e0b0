"""Flags that `serve` and `rollout` pass on to the engine that they start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.chat_tokenizer import write_checkpoint
from helpers.distributions import ROOT, module

ENGINE = """
import os
import sys

from miles_core.errors import EngineStartError


class Follower:
    urls = ()

    def alive(self):
        return True

    def close(self):
        print("closed", file=sys.stderr)


def launch_engine(config):
    if "FOLLOWS" in os.environ:
        return Follower()
    raise EngineStartError(f"given {' '.join(config.options)}; key {config.api_key}")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine, `fakes.engine`, and the checkpoint `checkpoint`."""
    made = tmp_path_factory.mktemp("fakes")
    module(made, "fakes.engine", ENGINE)
    write_checkpoint(made / "checkpoint")
    return made


def run(folder: Path, *words: str | Path, **environ: str) -> tuple[int, str]:
    """Exit code and standard error."""
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", **environ}
    name, *rest = map(str, words)
    given = [sys.executable, "-m", "miles_core", name, "--checkpoint", str(folder / "checkpoint"), *rest]
    done = subprocess.run(given, capture_output=True, text=True, env=env, timeout=120, check=False)
    return done.returncode, done.stderr


def serve(*words: str, engine: str = "fakes.engine") -> list[str]:
    return ["serve", "--tito-model", "qwen3", "--engine", engine, "--port", "0", *words]


def rollout(output: Path, *words: str, engine: str = "fakes.engine") -> list[str]:
    prompts = str(ROOT / "examples" / "tiny" / "prompts.jsonl")
    given = ["rollout", "--prompts", prompts, "--agent", "calculator", "--output", str(output / "out"), "--no-progress"]
    return [*given, "--tito-model", "qwen3", "--engine", engine, *words]


FLAGS = ("--mem-fraction-static", "0.8", "--tp=2", "--enable-something")


def test_serve_passes_on_what_it_does_not_know(folder: Path) -> None:
    expected = "Error: given --mem-fraction-static 0.8 --tp=2 --enable-something; key "
    assert run(folder, *serve(*FLAGS)) == (1, f"{expected}None\n")
    assert run(folder, *serve("--engine-api-key", "k", "--", *FLAGS)) == (1, f"{expected}k\n")


def test_rollout_passes_on_what_nobody_registered(folder: Path, tmp_path: Path) -> None:
    code, errors = run(folder, *rollout(tmp_path, *FLAGS))
    assert code == 1
    assert "given --mem-fraction-static 0.8 --tp=2 --enable-something; key None" in errors
    code, errors = run(folder, *rollout(tmp_path, "--", "--port", "7"))
    assert "given --port 7; key None" in errors


def test_an_engine_that_runs_takes_no_flags(folder: Path, tmp_path: Path) -> None:
    for command in (
        serve("--max-rolback", "2", engine="http://h:1"),
        rollout(tmp_path, "--concurency", "3", engine="http://h:1"),
    ):
        code, errors = run(folder, *command)
        assert code == 2
        assert "No such option" in errors
        assert "Did you mean" in errors
    code, errors = run(folder, *serve("word", engine="http://h:1"))
    assert (code, "Got unexpected extra argument (word)" in errors) == (2, True)


def test_an_engine_without_a_url_here_is_of_no_use(folder: Path, tmp_path: Path) -> None:
    for command in (serve(), rollout(tmp_path)):
        code, errors = run(folder, *command, FOLLOWS="1")
        assert code == 2
        assert "closed" in errors
        assert "--engine fakes.engine: it serves no requests here, as part of an engine on several nodes" in errors
