"""A thousand rollouts through the command: failing agents, slow tools, a dying engine and Ctrl-C; none is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.chat_tokenizer import IM_END, chat_family, encode, write_checkpoint
from helpers.fake_engine import FakeEngine, Reply
from miles_core.rollout.output import read_records
from miles_core.testing.fake_engine import chat_reply

pytestmark = pytest.mark.slow

PROMPTS, EACH = 250, 4
WRONG = ("never starts", "exits", "fails", "slow tool", "cancels itself", "bad reward", "bad answer")
HANG = (5,)
"""Prompts whose agents never end: their time runs out, early in the run, while others go on."""
COSTS_THE_ROLLOUT = ("never starts", "exits", "hangs")
"""The others leave turns behind, which are samples."""

SAID = {answer: [*encode(answer), IM_END] for answer in ("Yes.", "No.", "It is 4.", "I do not know.")}


def engine() -> FakeEngine:
    """Answers at once, one of a few texts, whose ids the samples are checked against."""
    rng = random.Random(1)

    def answer(body: Any) -> Reply:
        text = rng.choice(list(SAID))
        return chat_reply(SAID[text], text)

    return FakeEngine(chat_family(), always=answer)


@pytest.fixture
def engines() -> Iterator[list[FakeEngine]]:
    found = [engine(), engine()]
    for each in found:
        each.start()
    yield found
    for each in found:
        each.stop()


def write_prompts(path: Path) -> dict[int, str]:
    rng = random.Random(7)
    how = {at: rng.choice(WRONG) if rng.random() < 0.3 else "well" for at in range(PROMPTS)}
    how.update(dict.fromkeys(HANG, "hangs"))
    rows = [{"prompt": f"task {at}", "metadata": {"how": how[at], "number": at}} for at in range(PROMPTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return how


class Run:
    """The command, as a process of its own."""

    def __init__(self, folder: Path, engines: list[FakeEngine], checkpoint: Path, *, continuous: bool) -> None:
        self.output, self.log = folder / "out", folder / "log"
        urls = [word for each in engines for word in ("--engine", each.url)]
        self.command = [sys.executable, "-m", "miles_core", "rollout", "--prompts", str(folder / "prompts.jsonl")]
        self.command += ["--agent", "helpers.hostile_agent.run_agent", "--tito-model", "qwen3", *urls]
        self.command += ["--checkpoint", str(checkpoint), "--samples-per-prompt", str(EACH), "--json"]
        self.command += ["--output", str(self.output), "--concurrency", "24", "--sample-timeout", "12"]
        self.command += ["--engine-concurrency", "16", *(["--dynamic-filter", "rewards_differ"] * continuous)]
        self.environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        self.environment["MILES_EXPERIMENTAL_ROLLOUT_REFACTOR"] = "1" if continuous else ""

    def start(self) -> subprocess.Popen[str]:
        with self.log.open("a") as log:
            return subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=log, text=True, env=self.environment)

    def lines(self, name: str) -> list[dict[str, Any]]:
        path = self.output / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def over(self) -> int:
        """How many rollouts are over so far."""
        return sum((self.output / name).read_bytes().count(b"\n") for name in ("samples.jsonl", "failures.jsonl"))

    def wait_for(self, count: int, process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + 400
        while not (self.output / "failures.jsonl").exists() or self.over() < count:
            assert process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.02)


def end(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate(timeout=600)
    summary: dict[str, Any] = json.loads(output)
    return summary


def accounted(summary: dict[str, Any], before: int) -> int:
    """Rollouts by what became of them in this run; `before` were kept or left out by an earlier one."""
    parts = ("rollouts", "failures", "aborted_rollouts", "filtered_rollouts", "rollouts_not_begun")
    return sum(int(summary[part]) for part in parts) - before


@pytest.mark.timeout(900)
@pytest.mark.parametrize("continuous", [False, True])
def test_every_rollout_is_accounted_for(tmp_path: Path, engines: list[FakeEngine], continuous: bool) -> None:
    how = write_prompts(tmp_path / "prompts.jsonl")
    run = Run(tmp_path, engines, write_checkpoint(tmp_path / "model"), continuous=continuous)
    total = PROMPTS * EACH

    process = run.start()
    run.wait_for(100, process)
    engines[0].stop()
    run.wait_for(250, process)
    engines[0].start()
    run.wait_for(400, process)
    process.send_signal(signal.SIGINT)
    first = end(process)
    assert process.returncode == 130
    assert first["interrupted"]
    assert first["aborted_rollouts"] > 0
    assert accounted(first, 0) == total
    assert "agent abort" in run.log.read_text()

    failed_before, over = len(run.lines("failures.jsonl")), first["rollouts"] + first["filtered_rollouts"]
    groups_over = {each["prompt_index"] for each in [*read_records(run.output), *run.lines("filtered.jsonl")]}
    process = run.start()
    last = end(process)
    assert process.returncode == 0, run.log.read_text()[-3000:]
    again = total - over if not continuous else (PROMPTS - len(groups_over)) * EACH
    assert accounted(last, over) == again
    assert (last["aborted_rollouts"], last["rollouts_not_begun"], last["interrupted"]) == (0, 0, False)

    records = list(read_records(run.output))
    kept = {(each["prompt_index"], each["sample_index"]) for each in records}
    failed = {(each["prompt_index"], each["sample_index"]) for each in run.lines("failures.jsonl")[failed_before:]}
    left_out = {each["prompt_index"] for each in run.lines("filtered.jsonl")}
    assert len(kept) == len(records), "no rollout twice"
    assert not kept & failed
    assert not {prompt for prompt, _ in kept} & left_out
    everything = {(prompt, at) for prompt in range(PROMPTS) for at in range(EACH)}
    missing = everything - kept - failed - {(prompt, at) for prompt in left_out for at in range(EACH)}
    # a group that an earlier run has finished keeps the failures of that run
    assert all(continuous and prompt in groups_over for prompt, _ in missing)
    costs = {prompt for prompt, kind in how.items() if kind in COSTS_THE_ROLLOUT}
    assert not {prompt for prompt, _ in kept} & costs
    if not continuous:
        assert {prompt for prompt, _ in failed} == costs, "an engine that died cost nobody a rollout"
    check_tokens(records)
    assert sum(each["rollouts"] for each in run.lines("metrics.jsonl")) == (
        total + again - first["aborted_rollouts"] - first["rollouts_not_begun"]
    )


def check_tokens(records: list[dict[str, Any]]) -> None:
    """What is trained on is what the engine sampled, to the token, and nothing else."""
    answers = Counter(tuple(ids) for ids in SAID.values())
    for record in records:
        mask, tokens = record["loss_mask"], record["tokens"][-record["response_length"] :]
        spans: list[list[int]] = []
        for at, (on, token) in enumerate(zip(mask, tokens, strict=True)):
            if on and (at == 0 or not mask[at - 1]):
                spans.append([])
            if on:
                spans[-1].append(token)
            assert bool(record["rollout_log_probs"][at]) == bool(on)
        assert 1 <= len(spans) <= 2
        assert all(tuple(span) in answers for span in spans)
