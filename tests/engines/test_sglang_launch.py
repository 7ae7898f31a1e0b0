"""`--engine sglang`, through the command, with a package that starts and dies as SGLang does."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers.distributions import module
from helpers.fake_sglang import write_fake_sglang
from helpers.programs import runs

PARSERS = """
import os
import sys


def configure_sglang(server_args):
    sys.modules["fake_parsers"] = ["mine"]
    print("configured with", server_args.model_path, server_args.tp_size, file=sys.stderr, flush=True)
    if os.environ.get("BREAK"):
        raise LookupError("no such base parser")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake, and a plugin that configures it."""
    made = write_fake_sglang(tmp_path_factory.mktemp("sglang"))
    module(made, "acme.parsers", PARSERS)
    return made


def command(folder: Path, *words: str, **environ: str) -> tuple[list[str], dict[str, str]]:
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", **environ}
    given = [sys.executable, "-m", "miles_core", "engine", "--engine", "sglang", "--model", "some/model"]
    return [*given, *([] if "--tito-model" in words else ["--tito-model", "qwen3"]), *words], env


def fails(folder: Path, *words: str, **environ: str) -> tuple[int, str]:
    """Exit code and standard error of a command that must end by itself."""
    given, env = command(folder, *words, **environ)
    done = subprocess.run(given, env=env, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stderr


@contextmanager
def running(
    folder: Path, *words: str, urls: int = 1, **environ: str
) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """The command, up, and the URLs that it printed."""
    given, env = command(folder, *words, **environ)
    with open(folder / "stderr", "w+") as errors:
        process = subprocess.Popen(given, env=env, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert process.stdout is not None
            found = [process.stdout.readline().strip() for _ in range(urls)]
            assert all(found), (folder / "stderr").read_text()
            yield process, found
        finally:
            process.terminate()
            process.communicate(timeout=60)


def said(folder: Path) -> str:
    return (folder / "stderr").read_text()


def log_of(folder: Path) -> str:
    (path,) = set(re.findall(r"the log of sglang at \S+ is (\S+)", said(folder)))
    return Path(path).read_text()


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def pids(path: Path) -> list[list[int]]:
    """The server and its scheduler, of each start."""
    return [[int(word) for word in line.split()] for line in path.read_text().splitlines()] if path.exists() else []


# -- starting ------------------------------------------------------------------------------------------------


def test_it_serves_with_the_familys_parsers_and_flags_that_pass_through(folder: Path) -> None:
    with running(folder, "--mem-fraction-static", "0.8", "--", "--tp", "2") as (_, (url,)):
        assert healthy(url)
        port = url.rpartition(":")[2]
        line = f"args --model-path some/model --host 127.0.0.1 --port {port} --reasoning-parser qwen3 "
        assert f"{line}--tool-call-parser qwen25 --mem-fraction-static 0.8 --tp 2\n" in log_of(folder)
    assert said(folder).startswith(
        f"SGLang 0.5.23 of {os.path.abspath(sys.executable)} with some/model, "
        "reasoning by qwen3, tool calls by qwen25\n"
    )


def test_its_own_address_is_taken_over(folder: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with running(folder, "--", "--port", str(port), "--host", "0.0.0.0") as (_, (url,)):
        assert url == f"http://127.0.0.1:{port}"
        assert healthy(url)
        assert log_of(folder).count("--port") == log_of(folder).count("--host") == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, -9)])
def test_nothing_is_left_however_it_ends(folder: Path, tmp_path: Path, number: int, code: int) -> None:
    with running(folder, "--pids", str(tmp_path / "pids")) as (process, (url,)):
        (tree,) = pids(tmp_path / "pids")
        assert all(runs(pid) for pid in tree)
        process.send_signal(number)
        assert process.wait(60) == code
        until(lambda: not any(runs(pid) for pid in tree))
        assert not healthy(url)


def test_a_killed_launcher_leaves_no_folder(folder: Path) -> None:
    words = ("--plugin", "acme.parsers", "--tito-model", "default", "--tool-call-parser", "mine")
    temporary = folder / "temporary"
    temporary.mkdir()
    with running(folder, *words, TMPDIR=str(temporary)) as (process, _):
        assert list(temporary.glob("miles-sglang-*"))
        process.kill()
        until(lambda: not list(temporary.glob("miles-sglang-*")))


def test_a_signal_while_it_starts_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    given, env = command(folder, "--fault", "hang")
    process = subprocess.Popen(given, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while "the log of" not in (line := process.stderr.readline()):
        assert line
    log = Path(line.split()[-1])
    until(lambda: "devices" in log.read_text())
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors


def test_several_workers_share_the_devices(folder: Path) -> None:
    words = ("--engine-workers", "2", "--tp", "2")
    with running(folder, *words, urls=2, CUDA_VISIBLE_DEVICES="4,5,6,7") as (_, urls):
        assert all(healthy(url) for url in urls)
        logs = [Path(path).read_text() for path in re.findall(r"is (/\S+\.log)", said(folder))]
        assert ["devices 4,5" in logs[0], "devices 6,7" in logs[1]] == [True, True]


def test_the_second_of_two_nodes_has_no_url(folder: Path) -> None:
    given, env = command(folder, "--nnodes", "2", "--node-rank", "1")
    process = subprocess.Popen(given, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while "requests go to node 0" not in (line := process.stderr.readline()):
        assert line
    process.terminate()
    assert process.communicate(timeout=60)[0] == ""
    assert process.returncode == 0


# -- plugins inside ------------------------------------------------------------------------------------------


def test_configure_sglang_runs_in_every_process(folder: Path) -> None:
    words = ("--plugin", "acme.parsers", "--tito-model", "default", "--tool-call-parser", "mine")
    with running(folder, *words, "--tp=2"):
        assert log_of(folder).count("configured with some/model 2\n") == 2


def test_a_plugin_that_fails_there_is_named(folder: Path) -> None:
    code, errors = fails(folder, "--plugin", "acme.parsers", BREAK="1")
    assert code == 1
    assert "Error: engine acme.parsers failed in configure_sglang: LookupError: no such base parser" in errors
    assert "of SGLang; its log: /" in errors


def test_a_process_that_did_not_load_the_plugins_is_a_failure(folder: Path) -> None:
    code, errors = fails(folder, "--plugin", "acme.parsers", "--fault", "blind")
    assert code == 1
    assert "engine sglang did not run configure_sglang of its plugins in 1 of its processes (" in errors


def test_a_list_of_sglangs_plugins_keeps_ours_in(folder: Path) -> None:
    from miles_engines.sglang_server.bridge import Bridge

    bridge = Bridge([], [])
    try:
        assert bridge.environment({"SGLANG_PLUGINS": "theirs"})["SGLANG_PLUGINS"] == "theirs,miles"
        assert bridge.environment({"PYTHONPATH": "/a"})["PYTHONPATH"] == f"{bridge.folder}:/a"
    finally:
        bridge.close()


# -- dying ---------------------------------------------------------------------------------------------------


def test_a_worker_that_dies_is_started_again_at_its_address(folder: Path, tmp_path: Path) -> None:
    with running(folder, "--pids", str(tmp_path / "pids")) as (_, (url,)):
        os.kill(pids(tmp_path / "pids")[0][1], signal.SIGKILL)
        until(lambda: len(pids(tmp_path / "pids")) == 2 and healthy(url))
        until(lambda: f"sglang serves again at {url}\n" in said(folder))
        assert not any(runs(pid) for pid in pids(tmp_path / "pids")[0])
    assert re.search(
        r"engine sglang died \(exit code 1\)\nThe end of \S+:\n(.*\n)*Subprocess scheduler crashed\n"
        r"sglang is started again in 1 s\n",
        said(folder),
    )


# -- what keeps it from starting -----------------------------------------------------------------------------


def test_one_that_ends_while_it_loads_shows_the_end_of_its_log(folder: Path) -> None:
    code, errors = fails(folder, "--fault", "load")
    assert code == 1
    assert re.search(
        r"Error: engine sglang ended before it served \(exit code 1\)\nThe end of /\S+:\n(.*\n)*"
        r"RuntimeError: no memory for the weights\n",
        errors,
    )


def test_a_flag_that_sglang_does_not_know(folder: Path) -> None:
    code, errors = fails(folder, "--mem-fraction-statik", "1", "--plugin", "acme.parsers")
    assert code == 1
    assert "unrecognized arguments: --mem-fraction-statik 1" in errors


def test_a_port_in_use(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, errors = fails(folder, "--port", str(port))
    assert code == 1
    assert f"engine sglang cannot listen on 127.0.0.1:{port}: Address already in use" in errors


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ("--tool-call-parser", "kimi_k2"),
            "--tool-call-parser kimi_k2 contradicts the tool-call parser of --tito-model qwen3, which is qwen25: "
            "leave --tool-call-parser out",
        ),
        (("--reasoning-parser=kimi_k2",), "the reasoning parser of --tito-model qwen3, which is qwen3"),
        (("--tool-call-p", "kimi_k2"), "--tool-call-parser kimi_k2 contradicts"),
        (("--", "--model-path", "another"), "--model-path another contradicts --model, which is some/model"),
        (("--port", "7001", "--", "--port", "7002"), "--port 7002 contradicts our --port, which is 7001"),
        (("--tp", "two"), "--tp-size two: expected a number"),
        (("--engine-workers", "0"), "--engine-workers 0: expected 1 or more"),
        (("--engine-workers", "2", "--nnodes", "2"), "a worker on several nodes is one"),
        (("--engine-python", "/no/such/python"), "--engine-python /no/such/python: there is no such program"),
        (("--engine-python", "/bin/false"), "--engine-python /bin/false: cannot be run as a Python: exit code 1\n"),
        (("--port", "99999"), "99999 is not in the range 0<=x<=65535"),
        (
            ("--plugin", "acme.parsers", "--tokenizer-worker-num", "2"),
            "--tokenizer-worker-num 2: SGLang loads no plugins in those processes, and engine acme.parsers has",
        ),
        (("--plugin", "qwen3"), "has no configure_sglang; nothing of it concerns SGLang"),
    ],
)
def test_wrong_use(folder: Path, words: tuple[str, ...], text: str) -> None:
    code, errors = fails(folder, *words)
    assert code == 2
    assert text in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("there", "/there: no config.json in this directory"),
        ("not_there", "/not_there: there is no such directory"),
    ],
)
def test_a_model_that_is_none(folder: Path, tmp_path: Path, model: str, text: str) -> None:
    """SGLang is not even started: it would say so after a minute, at the end of a long traceback."""
    (tmp_path / "there").mkdir()
    code, errors = fails(folder, "--model", str(tmp_path / model))
    assert code == 2
    assert text in errors
    assert len(errors.splitlines()) == 1


def test_a_port_beyond_all_ports(folder: Path) -> None:
    code, errors = fails(folder, "--", "--port", "99999")
    assert code == 1
    assert errors.endswith("Error: engine sglang cannot listen on 127.0.0.1:99999: bind(): port must be 0-65535.\n")


def test_too_few_devices_for_the_workers(folder: Path) -> None:
    code, errors = fails(folder, "--engine-workers", "2", "--tp", "2", CUDA_VISIBLE_DEVICES="0,1,2")
    assert code == 2
    assert "--engine-workers: worker 1 takes 2 GPUs, and CUDA_VISIBLE_DEVICES=0,1,2 has no more" in errors


def test_sglang_is_not_installed(tmp_path: Path) -> None:
    code, errors = fails(tmp_path)
    assert code == 1
    assert errors == (
        f"Error: engine sglang needs SGLang, which {os.path.abspath(sys.executable)} does not have: pip install "
        "'miles-plugins[sglang]', or name the Python of an environment that has it with --engine-python\n"
    )
    code, errors = fails(tmp_path, "--engine-python", sys.executable)
    assert f"which {sys.executable} does not have: {sys.executable} -m pip install 'sglang>=0.5.23'\n" in errors
