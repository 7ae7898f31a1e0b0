"""`miles-plugins serve`, run as a command: its start-up block, its refusals, and what it does not import."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from helpers.chat_tokenizer import write_checkpoint
from helpers.fake_engine import fake_engine
from helpers.sessions import Talk, user
from miles_core.cli.serve import loading

MILES_PICK = "miles.rollout.session.v2.picker_hub.drop_retries"
MILES_POST = "miles.rollout.session.v2.postprocessor_hub.default_postprocess"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def serve(*flags: str, code: str = "") -> list[str]:
    run = f"{code}\nfrom miles_core.cli import main\nmain(prog_name='miles-plugins')"
    return [sys.executable, "-c", run, "serve", *flags]


@pytest.fixture
def server(checkpoint: Path) -> Iterator[subprocess.Popen[str]]:
    # prints, when it ends, which heavy libraries the whole process imported
    code = (
        "import atexit, sys\n"
        "heavy = ('torch', 'transformers', 'sglang', 'ray')\n"
        "atexit.register(lambda: print('heavy:', [m for m in heavy if m in sys.modules], file=sys.stderr))"
    )
    flags = ("--checkpoint", str(checkpoint), "--tito-model", "qwen3", "--engine", "http://127.0.0.1:9", "--port", "0")
    process = subprocess.Popen(serve(*flags, code=code), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()


def test_the_start_up_block_the_health_and_a_clean_end(server: subprocess.Popen[str], checkpoint: Path) -> None:
    assert server.stdout is not None
    block = [server.stdout.readline().rstrip() for _ in range(9)]
    assert block[0] == "miles-plugins session server"
    rows = dict(line.split(maxsplit=1) for line in block[1:])
    assert rows["model"] == str(checkpoint)
    assert rows["family"] == "qwen3@qwen3, revision chosen: the only one"
    assert rows["template"] == "miles_tito_families/templates/qwen3.jinja"
    assert rows["matcher"] == "strict"
    assert rows["history"].startswith("linear")
    assert rows["engine"] == "http://127.0.0.1:9"
    assert rows["plugins"].startswith("family qwen3 of miles-plugins ")
    with urlopen(rows["url"] + "/health", timeout=20) as answer:
        assert json.load(answer)["status"] == "ok"
    server.send_signal(signal.SIGTERM)
    _, errors = server.communicate(timeout=20)
    assert "heavy: []" in errors


def test_cycles_are_not_looked_for_while_loading() -> None:
    with loading():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_several_processes_print_one_block_and_end_together(checkpoint: Path) -> None:
    flags = ("--checkpoint", str(checkpoint), "--tito-model", "qwen3", "--engine", "http://127.0.0.1:9", "--port", "0")
    command = serve(*flags, "--workers", "2")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        block = [process.stdout.readline().rstrip() for _ in range(10)]
        rows = dict(line.split(maxsplit=1) for line in block[1:])
        assert rows["workers"] == "2 processes"
        places: set[str] = set()
        while len(places) < 2:
            made = urlopen(Request(rows["url"] + "/sessions", method="POST"), timeout=20)
            with made as answer:
                places.add(json.load(answer)["session_id"][:2])
        assert places == {"00", "01"}
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=30)
        assert (process.returncode, rest) == (0, "")
        assert "Traceback" not in errors
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--tito-model", "qwen9"), "no family is named qwen9; did you mean qwen3?"),
        (("--tito-model", "qwen3@qwen4"), "family qwen3 has no revision 'qwen4'; it has: qwen3"),
        (("--tito-model", "qwen3", "--message-matcher", "strickt"), "did you mean strict?"),
        (("--tito-model", "qwen3", "--use-session-server", "v2", "--history", "linear"), "contradict each other"),
        (("--tito-model", "qwen3", "--apply-chat-template-kwargs", "{"), "not JSON"),
        (
            ("--tito-model", "qwen3", "--apply-chat-template-kwargs", '{"clear_thinking": true}'),
            "is in conflict with family qwen3",
        ),
        (("--tito-model", "qwen3", "--workers", "0"), "--workers 0: expected a number of processes from 1 to 256"),
        (("--tito-model", "qwen3", "--workers", "257"), "--workers 257: expected a number of processes from 1 to 256"),
        (("--tito-model", "qwen3", "--max-sessions", "-3"), "--max-sessions -3: expected 0 (no limit) or more"),
        (("--tito-model", "default"), "uses the checkpoint's own chat template"),
        (("--tito-model", "qwen3", "--max-body-mb", "0"), "--max-body-mb 0.0: expected more than 0"),
    ],
)
def test_a_wrong_setting_ends_with_what_and_what_next(checkpoint: Path, flags: tuple[str, ...], text: str) -> None:
    command = serve("--checkpoint", str(checkpoint), "--engine", "http://127.0.0.1:9", "--port", "0", *flags)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("engine", ["localhost:30000", "127.0.0.1:30000", "[::1]:30000", "gpu-1.local:30000/v1"])
def test_an_address_without_http_is_no_plugin(checkpoint: Path, engine: str) -> None:
    command = serve("--checkpoint", str(checkpoint), "--tito-model", "qwen3", "--engine", engine)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"begins with http://; did you mean http://{engine}?" in done.stderr


def test_sample_hooks_of_miles_by_their_own_names(checkpoint: Path, tmp_path: Path) -> None:
    """Its default is ours; another one, written for miles, is imported with what it imports itself."""
    (tmp_path / "their_hooks.py").write_text(
        "from miles.utils.types import Sample\n"
        "from miles.rollout.session.v2.picker_hub import drop_retries\n"
        "def pick(leaf_samples, session_metadata):\n"
        "    assert all(isinstance(sample, Sample) for sample in leaf_samples)\n"
        "    return drop_retries(leaf_samples, session_metadata)\n"
    )
    flags = ("--checkpoint", str(checkpoint), "--tito-model", "qwen3", "--engine", "http://127.0.0.1:9", "--port", "0")
    flags += ("--history", "tree", "--compat", "miles", "--session-sample-postprocessor-path", MILES_POST)
    for pick, shown in ((MILES_PICK, "drop_retries"), ("their_hooks.pick", "their_hooks.pick")):
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        process = subprocess.Popen(
            serve(*flags, "--session-sample-picker-path", pick),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        try:
            assert process.stdout is not None
            block = [process.stdout.readline() for _ in range(9)]
            assert f"tree, samples by {shown} and shared_prefix_mask" in "".join(block), process.communicate(timeout=20)
        finally:
            process.terminate()
            process.communicate(timeout=20)


THEIR_HOOKS = """
import os

def pick(leaf_samples, session_metadata):
    from miles.rollout.session.v2.picker_hub import drop_retries
    return drop_retries(leaf_samples, session_metadata)

def postprocess(leaf_samples, session_metadata):
    from miles.rollout.session.v2.postprocessor_hub import default_postprocess
    from miles.utils.types import Sample
    for sample in leaf_samples:
        assert isinstance(sample, Sample)
        sample.metadata["process"] = os.getpid()
    return default_postprocess(leaf_samples, session_metadata)
"""


@pytest.mark.parametrize("pick", ["their_hooks.pick", MILES_PICK])
def test_modules_of_miles_work_in_every_process(checkpoint: Path, tmp_path: Path, pick: str) -> None:
    """They import what they need of it when they are called, which is after the fork."""
    (tmp_path / "their_hooks.py").write_text(THEIR_HOOKS)
    with fake_engine() as engine:
        flags = ["--checkpoint", str(checkpoint), "--tito-model", "qwen3", "--engine", engine.url, "--port", "0"]
        flags += ["--use-session-server", "v2", "--compat", "miles", "--workers", "2"]
        flags += ["--session-sample-picker-path", pick]
        flags += ["--session-sample-postprocessor-path", "their_hooks.postprocess"]
        process = subprocess.Popen(
            serve(*flags),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )
        try:
            assert process.stdout is not None
            url = [process.stdout.readline() for _ in range(10)][-1].split()[1]
            seen: dict[str, int] = {}
            while len(seen) < 2:
                talk = Talk(url)
                talk.ask(user("Hello"))
                for _ in range(2):  # the second is a retry of the first, which is then dropped
                    assert talk.post([*talk.history, user("Again")]).status == 200
                (sample,) = talk.samples().samples
                seen[talk.id[:2]] = sample["metadata"]["process"]
            assert len({process.pid, *seen.values()}) == 3
        finally:
            process.terminate()
            assert "Traceback" not in process.communicate(timeout=30)[1]


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    flags = ("--checkpoint", str(tmp_path / "none"), "--tito-model", "qwen3", "--engine", "http://127.0.0.1:9")
    done = subprocess.run(serve(*flags), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "there is no such directory" in done.stderr


def test_unreadable_metadata_of_an_unrelated_distribution_stops_nothing(checkpoint: Path, tmp_path: Path) -> None:
    info = tmp_path / "zz_broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: zz-broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_bytes(b"\xff\xfe[x]\n")
    flags = ("--checkpoint", str(checkpoint), "--tito-model", "qwen3", "--engine", "http://127.0.0.1:9", "--port", "0")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    process = subprocess.Popen(
        serve(*flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "miles-plugins session server\n"
    finally:
        process.terminate()
        process.communicate(timeout=20)
