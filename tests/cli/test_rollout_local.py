"""`miles-plugins rollout` as a user runs it: the real engine, session server, agent and a tiny random model."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from helpers.tiny import write_model
from miles_core.cli import main, rollout_run
from miles_engines.local import LocalEngine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


def run(model: Path, folder: Path) -> Result:
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "What is 1 + 1?", "label": "2"}\n{"prompt": "What is 3 * 4?", "label": "12"}\n')
    command = ["rollout", "--prompts", prompts, "--agent", "calculator", "--tito-model", "qwen3", "--engine", "local"]
    command += ["--model", model, "--samples-per-prompt", "2", "--max-tokens", "12", "--output", folder / "out"]
    return CliRunner().invoke(main, [str(part) for part in command])


@pytest.mark.slow
def test_a_rollout_with_the_built_in_engine(model: Path, tmp_path: Path) -> None:
    result = run(model, tmp_path)
    assert result.exit_code == 0, result.output
    samples = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 4
    for sample in samples:
        trained = [value for value, on in zip(sample["rollout_log_probs"], sample["loss_mask"], strict=True) if on]
        assert trained
        assert all(value < 0 for value in trained)
        assert sample["metadata"]["accumulated_token_ids"] == sample["tokens"]
    shown = CliRunner().invoke(main, ["inspect", str(tmp_path / "out")])
    assert "turn 1, sampled" in shown.stdout
    assert "What is" in shown.stdout


@pytest.mark.slow
def test_a_dead_engine_ends_the_run(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = LocalEngine.start

    def start_and_die(self: LocalEngine) -> None:
        start(self)
        assert self.pid is not None
        os.kill(self.pid, signal.SIGKILL)

    monkeypatch.setattr(LocalEngine, "start", start_and_die)
    monkeypatch.setattr(rollout_run, "WATCH_INTERVAL", 0.01)
    result = run(model, tmp_path)
    assert result.exit_code == 1
    assert "engine local of miles-plugins" in result.stderr
    assert "died; the end of" in result.stderr
    assert (tmp_path / "out" / "summary.json").exists()
