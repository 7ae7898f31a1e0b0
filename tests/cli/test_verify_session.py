"""`miles-plugins verify session`, run as a command: the built-in engine with the tiny model, and what goes wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from click.testing import CliRunner

from helpers.chat_tokenizer import write_checkpoint
from helpers.distributions import module
from helpers.fake_engine import fake_engine
from miles_core.cli import main

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny" / "model"
BROKEN = '''"""Ends its turns without the line break that its template writes."""

import dataclasses

from miles_tito_families import qwen3


def tito_family():
    return dataclasses.replace(qwen3.FAMILY, name="acme", turn_end="<|im_end|>")
'''
KEYS = {
    "schema", "ok", "verdict", "summary", "family", "checkpoint", "engine", "histories", "cycles", "seed", "turns",
    "streams", "events", "checks", "assistant_text", "rendering",
}  # fmt: skip
"""Of the JSON; one that goes or changes its meaning raises the schema's number."""
QWEN3 = ("--tito-model", "qwen3")
EVENTS = {
    "append tool", "append user", "append system", "append assistant", "tool call", "parallel calls", "retry",
    "re-sent history", "branches", "streamed", "cut off", "samples",
}  # fmt: skip


def verify(*flags: str | Path, path: Path | None = None, timeout: float = 1000) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "miles_core", "verify", "session", *map(str, flags)]
    environ = dict(os.environ)
    if path is not None:
        environ["PYTHONPATH"] = os.pathsep.join([str(path), environ.get("PYTHONPATH", "")])
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=False, encoding="utf-8", env=environ
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_tiny_model_with_the_built_in_engine() -> None:
    done = verify("--checkpoint", TINY, "--tito-model", "qwen3", "--engine", "local", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    assert (answer["schema"], answer["ok"], answer["verdict"], answer["family"]) == (1, True, "PASS", "qwen3@qwen3")
    assert set(answer) == KEYS
    assert set(answer["events"][0]) == {"history", "name", "count", "required", "missing", "why"}
    assert set(answer["checks"][0]) == {"name", "passed", "failures"}
    assert answer["engine"]["given"] == "local"
    assert answer["engine"]["serves"] == str(TINY)
    assert answer["engine"]["same_tokenizer"] is True
    assert answer["engine"]["forced"] is False
    assert answer["histories"] == ["linear", "tree"]
    counts = {(event["history"], event["name"]): event["count"] for event in answer["events"]}
    assert {name for history, name in counts if history == "linear"} == {*EVENTS, "on after a cut"}
    assert {name for history, name in counts if history == "tree"} == {*EVENTS, "refused after a cut"}
    assert min(count for (_, name), count in counts.items() if name != "parallel calls") >= 2
    assert [check["name"] for check in answer["checks"]] == [
        "answered", "prefix", "records", "text", "self-check", "samples", "rendering",
    ]  # fmt: skip
    assert all(check["passed"] and not check["failures"] for check in answer["checks"])
    assert sum(answer["streams"].values()) == counts["linear", "streamed"] + counts["tree", "streamed"]
    assert answer["rendering"]["told_ids"] == answer["rendering"]["asked"] >= 2
    assert answer["rendering"]["otherwise"] == {}
    text = answer["assistant_text"]
    assert text["counted"] > 50
    assert 0 <= text["share"] <= text["limit"] == 0.2


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_table_of_a_shorter_run() -> None:
    done = verify("--model", TINY, "--tito-model", "qwen3", "--history", "v1", "--cycles", "1", "--threads", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "family     qwen3@qwen3"
    assert max(map(len, lines[2:])) <= max(80, len(f"checkpoint {TINY}"))
    head = " ".join(done.stdout.partition("EVENT")[0].split())
    assert f"checkpoint {TINY} engine local at http://127.0.0.1:" in head
    assert "answers asked for (the engine refuses regex with 400: " in head
    assert "in 1 cycles of linear histories, seed 1 streamed " in head
    assert "EVENT             LINEAR" in lines
    assert "CHECK       PASSED  FAILED" in lines
    assert lines[-1].startswith("PASS: ")
    assert lines[-1].endswith("checks, every needed event happened")
    assert "loading " in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_family_that_joins_wrongly(tmp_path: Path) -> None:
    module(tmp_path, "acme_broken.family", BROKEN)
    family = ("--tito-model", "acme_broken.family", "--cycles", "1", "--history", "linear")
    done = verify("--checkpoint", TINY, *family, path=tmp_path)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0].startswith("family     acme@")
    assert any(line.startswith("FAIL  self-check, linear, conversation ") for line in lines)
    assert "non_assistant_text in segment" in done.stdout
    assert "more failed; --json has all of it" in done.stdout
    assert lines[-1].startswith("FAIL: ")
    assert "self-check)" in lines[-1]


def test_an_engine_without_answers(tmp_path: Path) -> None:
    """What goes wrong in every conversation is shown once, and ends in FAIL."""
    checkpoint = write_checkpoint(tmp_path)
    with fake_engine() as engine:
        engine.always = lambda body: engine.says("Fine.", ids=[1, 2], log_probs=[0.0])
        done = verify("--checkpoint", checkpoint, "--tito-model", "qwen3", "--engine", engine.url, "--cycles", "1")
    assert done.returncode == 1
    assert done.stdout.count("FAIL  answered, ") == 1
    assert "HTTP 502" in done.stdout
    assert "13 more failed; --json has all of it" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("FAIL: ")
    assert "Traceback" not in done.stderr


def test_what_is_no_engine() -> None:
    handler = partial(SimpleHTTPRequestHandler, directory=str(TINY))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        done = CliRunner().invoke(main, ["verify", "session", "--model", str(TINY), *QWEN3, "--engine", url])
        server.shutdown()
    assert (done.exit_code, done.stdout) == (1, "")
    assert f"--engine {url}: what answers there is no engine: neither /model_info nor /v1/models" in done.stderr


# -- wrong use ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "code", "text"),
    [
        ((), 2, "--checkpoint is missing: give the directory"),
        (("--checkpoint", "./absent"), 2, "there is no such directory"),
        (("--checkpoint", TINY, "--tito-model", "qwen9"), 2, "did you mean qwen3?"),
        (("--checkpoint", TINY, "--tito-model", "qwen3", "--engine", "lokal"), 2, "did you mean local?"),
        (("--checkpoint", TINY, "--engine", "local", "--engine", "http://x"), 2, "give URLs, or one engine's name"),
        (("--checkpoint", TINY, "--engine", "http://127.0.0.1:9", "--threads", "1"), 2, "No such option: --threads"),
        (("--checkpoint", TINY, "--history", "both", "--cycles", "0"), 2, "'--cycles'"),
        (("--checkpoint", TINY, "--max-assistant-text-share", "2"), 2, "2.0 is not in the range"),
        (
            ("--checkpoint", TINY, "--tito-model", "qwen3", "--engine", "http://127.0.0.1:9"), 1,
            "--engine http://127.0.0.1:9: no engine answers there",
        ),
        (
            ("--checkpoint", TINY, "--tito-model", "qwen3", "--engine", "127.0.0.1:9"), 2,
            "did you mean http://127.0.0.1:9?",
        ),
        (("--checkpoint", TINY, "--tito-model", "qwen3", "--no-such-flag"), 1, "--no-such-flag"),
    ],
)  # fmt: skip
def test_wrong_use(flags: tuple[str | Path, ...], code: int, text: str) -> None:
    done = CliRunner().invoke(main, ["verify", "session", *map(str, flags)])
    assert (done.exit_code, done.stdout) == (code, ""), done.output
    assert text in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_checkpoint_of_another_model_than_is_served(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path)
    served = [sys.executable, "-m", "miles_core", "engine", "--engine", "local", "--model", str(TINY)]
    with subprocess.Popen([*served, "--tito-model", "qwen3"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            done = verify("--checkpoint", checkpoint, "--tito-model", "qwen3", "--engine", url)
        finally:
            process.terminate()
    assert (done.returncode, done.stdout) == (2, "")
    assert f"serves {TINY} with another tokenizer than --checkpoint {checkpoint}: token " in done.stderr
