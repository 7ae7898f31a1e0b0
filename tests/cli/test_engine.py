"""`miles-plugins engine`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.distributions import module
from helpers.tiny import write_model

ENGINE = """
from pathlib import Path


class Fake:
    urls = ("http://127.0.0.1:1",)

    def alive(self):
        return False

    def close(self):
        print("closed")


def launch_engine(config):
    config.progress(" ".join([config.model, config.checkpoint, config.tito_model, config.host, str(config.port)]))
    config.progress(" ".join(config.options))
    return Fake()
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "miles_core", "engine", *arguments]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    module(folder, "fakes.engine", ENGINE)
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    given = command("--engine", "fakes.engine", "--tito-model", "qwen3", *arguments)
    return subprocess.run(given, capture_output=True, text=True, env=env, timeout=60, check=False)


def test_an_engine_that_dies_is_a_failure(tmp_path: Path) -> None:
    done = run(tmp_path, "--model", "some/model", "--port", "7", "--max-batch", "8", "--deep")
    assert done.returncode == 1
    assert done.stdout == "http://127.0.0.1:1\n"
    assert done.stderr.splitlines() == [
        "some/model some/model qwen3 127.0.0.1 7",
        "--max-batch 8 --deep",
        "closed",
        "Error: engine fakes.engine at http://127.0.0.1:1 ended by itself",
    ]


@pytest.mark.parametrize("answer", ["None", "object()"])
def test_what_is_no_engine_is_a_fault_of_the_plugin(tmp_path: Path, answer: str) -> None:
    module(tmp_path, "fakes.wrong", f"def launch_engine(config):\n    return {answer}\n")
    done = run(tmp_path, "--model", "some/model", "--engine", "fakes.wrong")
    assert done.returncode == 1
    kind = "NoneType" if answer == "None" else "object"
    assert done.stderr == (
        f"Error: engine fakes.wrong: launch_engine returned {kind}, expected an engine with urls, alive() and close()\n"
    )


def test_checkpoint_and_model_stand_in_for_each_other(tmp_path: Path) -> None:
    assert run(tmp_path, "--hf-checkpoint", "a/b").stderr.startswith("a/b a/b qwen3")
    assert run(tmp_path, "--checkpoint", "a/b", "--model", "c/d").stderr.startswith("c/d a/b qwen3")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "--model is missing: give the directory of the model that the engine shall serve"),
        (("--model", "m", "--engine", "http://h:1"), "--engine http://h:1: that one runs already"),
        (("--model", "m", "--engine", "locla"), "local"),
    ],
)
def test_wrong_usage(tmp_path: Path, arguments: tuple[str, ...], text: str) -> None:
    done = run(tmp_path, *arguments)
    assert done.returncode == 2
    assert text in done.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


def start(model: Path) -> tuple[subprocess.Popen[str], str]:
    given = command("--engine", "local", "--model", str(model), "--tito-model", "qwen3", "--max-batch", "2")
    process = subprocess.Popen(given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGKILL, -9)])
def test_it_serves_until_a_signal_and_leaves_nothing_behind(model: Path, number: int, code: int) -> None:
    process, url = start(model)
    with process:
        assert answers(url)
        process.send_signal(number)
        assert process.wait(30) == code
        until(lambda: not answers(url))
