"""What `miles-plugins rollout` refuses to combine, how it stops, and what it leaves in its folder."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from helpers.fake_engine import FakeEngine, Gate
from helpers.fake_generate import FakeGenerate, reply, serving_in_thread
from miles_core.cli import main
from miles_core.rollout.output import read_records, read_samples
from miles_core.testing.fake_engine import chat_reply

TINY = str(Path(__file__).parents[2] / "examples/tiny/model")
AGENT = ["--agent", "calculator"]


@pytest.fixture
def engine() -> Iterator[FakeGenerate]:
    fake = FakeGenerate(script=[reply([5, 6])] * 200)
    with serving_in_thread(fake):
        yield fake


def command(folder: Path, url: str, *more: str, count: int = 3) -> list[str]:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Add {at}"}) + "\n" for at in range(count)))
    words = ["rollout", "--prompts", str(prompts), "--output", str(folder / "out"), "--tito-model", "qwen3"]
    return [*words, "--engine", url, "--model", TINY, "--no-progress", *more]


def rollout(folder: Path, url: str, *more: str, count: int = 3) -> Result:
    return CliRunner().invoke(main, command(folder, url, *more, count=count))


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out" / "summary.json").read_text())
    return found


TREE = ["--history", "tree"]


@pytest.mark.parametrize(
    ("more", "named", "way_out"),
    [
        ([*AGENT, *TREE, "--partial-rollout"], "--partial-rollout with tree histories", "use --history linear"),
        (
            [*AGENT, *TREE, "--group-reward", "--reward-function", "json.dumps"],
            "--group-reward (--group-rm) with tree histories",
            "use --history linear, or a reward function for single samples",
        ),
        (
            [*AGENT, *TREE, "--recompute-logprobs-via-prefill"],
            "--recompute-logprobs-via-prefill with tree histories",
            "leave the flag out, samples have the log-probabilities they were sampled with",
        ),
        (
            [*AGENT, "--pause-generation-mode", "abort"],
            "--pause-generation-mode abort with sessions",
            "use --pause-generation-mode retract or in_place",
        ),
        (
            [*AGENT, *TREE, "--pause-generation-mode", "abort"],
            "--pause-generation-mode abort with sessions",
            "use --pause-generation-mode retract or in_place",
        ),
        ([*AGENT, "--apply-chat-template"], "--apply-chat-template with --generate agentic", "leave the flag out"),
        (
            [*AGENT, "--generate", "miles-plugins:agentic", "--apply-chat-template"],
            "--apply-chat-template with --generate agentic",
            "leave the flag out",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_way_out(
    tmp_path: Path, more: list[str], named: str, way_out: str
) -> None:
    result = rollout(tmp_path, "http://127.0.0.1:9", *more)
    assert result.exit_code == 2
    assert named in result.stderr
    assert way_out in result.stderr.replace("\n", " ").replace("  ", " ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "more",
    [
        ["--partial-rollout"],
        ["--pause-generation-mode", "abort"],
        ["--apply-chat-template"],
        ["--recompute-logprobs-via-prefill"],
        ["--group-reward", "--reward-function", f"{__name__}.ranks"],
    ],
)
def test_each_of_these_alone_is_fine(engine: FakeGenerate, tmp_path: Path, more: list[str]) -> None:
    result = rollout(tmp_path, engine.url, "--generate", "single_turn", *more)
    assert result.exit_code == 0, result.output
    assert summary(tmp_path)["samples"] == 3


def ranks(samples: list[Any]) -> list[float]:
    """A group reward."""
    return [1.0] * len(samples)


@pytest.mark.parametrize("form", ["jsonl", "parquet", "safetensors"])
def test_each_format_is_resumed_inspected_and_read(engine: FakeGenerate, tmp_path: Path, form: str) -> None:
    flags = ["--generate", "single_turn", "--output-format", form]
    assert rollout(tmp_path, engine.url, *flags, "--limit", "1").exit_code == 0
    result = rollout(tmp_path, engine.url, *flags)
    assert "1 done before" in result.stderr
    assert len(engine.requests) == 3
    out = tmp_path / "out"
    assert len(list(read_records(out))) == 3
    assert [each.tokens for each in read_samples(out)] == [each["tokens"] for each in read_records(out)]
    assert bool((out / "samples.jsonl").read_bytes()) == (form == "jsonl")
    assert "nothing to do" in rollout(tmp_path, engine.url, *flags).stderr
    shown = CliRunner().invoke(main, ["inspect", str(out), "2"])
    assert (shown.exit_code, "sample 2 of 3" in shown.stdout) == (0, True)
    (first, *_) = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert (first["step"], first["rollouts"]) == (0, 1)


def test_a_run_that_only_fails_ends_early_and_says_why(engine: FakeGenerate, tmp_path: Path) -> None:
    engine.script = [400] * 200
    flags = ["--generate", "single_turn", "--concurrency", "4", "--stop-after-failures", "6"]
    result = rollout(tmp_path, engine.url, *flags, count=50)
    assert result.exit_code == 1
    assert "Error: 6 rollouts in a row failed with the same error" in result.stderr
    assert "scripted 400" in result.stderr
    assert 6 <= len(engine.requests) < 15
    found = summary(tmp_path)
    assert found["failures"] + found["aborted_rollouts"] + found["rollouts_not_begun"] == 50


def test_a_prompt_without_room_is_told_and_its_agent_not_run(
    engine: FakeGenerate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = rollout(tmp_path, engine.url, *AGENT, "--max-seq-len", "5", count=2)
    assert result.exit_code == 0, result.output
    assert "and --max-seq-len is 5: the agent was not run" in caplog.text
    records = list(read_records(tmp_path / "out"))
    assert [(each["status"], each["response_length"]) for each in records] == [("truncated", 0)] * 2
    assert engine.requests == []


def test_engine_concurrency_holds_for_the_turns_of_agents(tmp_path: Path) -> None:
    gate = Gate()
    engine = FakeEngine(always=lambda body: chat_reply([5, 6], "Fine.", gate=gate))
    engine.start()
    process = None
    try:
        words = command(tmp_path, engine.url, *AGENT, "--engine-concurrency", "2", count=6)
        process = subprocess.Popen([sys.executable, "-m", "miles_core", *words], stderr=subprocess.DEVNULL)
        engine.wait_for(lambda: len(engine.turns) == 2, 120)
        time.sleep(0.5)  # a third one would come at once
        assert len(engine.turns) == 2
        gate.open()
        assert process.wait(120) == 0
    finally:
        gate.open()
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()
        engine.stop()
    assert summary(tmp_path)["samples"] == 6


@pytest.mark.slow
def test_ctrl_c_on_the_built_in_engine_keeps_tokens_and_goes_on(tmp_path: Path) -> None:
    """A long answer of the real model is stopped in the middle; the next run samples only what was left."""
    lengths = ["--generate", "random_length", "--generate-min-length", "600", "--generate-max-length", "600"]
    flags = [*lengths, "--partial-rollout", "--seed", "1", "--concurrency", "2", "--json"]
    words = [sys.executable, "-m", "miles_core", *command(tmp_path, "local", *flags, count=2)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    seen = []
    url = ""
    for line in process.stderr:
        seen.append(line)
        if line.startswith("engine "):
            url = line.split()[-1]
            break
    wait_until_sampling(url)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 130, "".join(seen) + errors
    first = json.loads(output)
    partial = [json.loads(line) for line in (tmp_path / "out" / "partial.jsonl").read_text().splitlines()]
    assert first["aborted_rollouts"] == 2
    assert first["partial_rollouts"] == len(partial) >= 1
    assert all(0 < each["response_length"] < 600 for each in partial)
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    records = {each["prompt_index"]: each for each in read_records(tmp_path / "out")}
    for each in partial:
        record = records[each["prompt_index"]]
        kept = len(each["tokens"])
        assert record["tokens"][:kept] == each["tokens"]
        assert record["rollout_log_probs"][: each["response_length"]] == each["rollout_log_probs"]
        assert (record["response_length"], sum(record["loss_mask"])) == (600, 600)
    assert not (tmp_path / "out" / "partial.jsonl").exists()


def wait_until_sampling(url: str) -> None:
    """Until the engine has read a prompt, and so is in the middle of an answer."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"{url}/server_info", timeout=60) as answer:
            load = json.load(answer)
        if load["running"] == 2 and load["cached_tokens"] > 10:
            return
        time.sleep(0.02)
    raise AssertionError(f"the engine never came to sample: {load}")
