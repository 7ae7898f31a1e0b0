"""The generate functions over `/generate`, from the command line, with the real engine and the tiny model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from helpers import arithmetic
from miles_core.cli import main
from miles_core.engine.base import EngineConfig
from miles_core.plugins import Registry

TINY = Path(__file__).parents[2] / "examples" / "tiny"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The built-in engine with the tiny model."""
    plugin = Registry.discover().load("engine", "local")
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    model = str(TINY / "model")
    engine = plugin.call("launch_engine", EngineConfig(model=model, checkpoint=model, tito_model="qwen3", log_file=log))
    try:
        yield engine.urls[0]
    finally:
        engine.close()


def run(url: str, folder: Path, generate: str, *more: str) -> list[dict[str, Any]]:
    command = [
        "rollout", "--prompts", str(TINY / "prompts.jsonl"), "--limit", "6", "--generate", generate,
        "--tito-model", "qwen3", "--engine", url, "--model", str(TINY / "model"), "--seed", "1",
        "--output", str(folder), "--no-progress", *more,
    ]  # fmt: skip
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_multi_turn_solves_what_the_agent_solves(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    monkeypatch.setitem(sys.modules, "tiny_tools", arithmetic)
    samples = run(
        url, tmp_path / "out", "multi_turn", "--generate-tool-specs-path", "tiny_tools.TOOLS",
        "--generate-execute-tool-function-path", "tiny_tools.execute",
    )  # fmt: skip
    right = [f"The answer is {sample['label']}." in sample["response"] for sample in samples]
    assert sum(right) >= 3
    model = AutoModelForCausalLM.from_pretrained(TINY / "model", dtype=torch.float32).eval()
    for sample in samples:
        with torch.no_grad():
            log_probs = torch.log_softmax(model(torch.tensor([sample["tokens"]])).logits[0].float(), dim=-1)
        start = len(sample["tokens"]) - sample["response_length"]
        for at, (on, stored) in enumerate(zip(sample["loss_mask"], sample["rollout_log_probs"], strict=True), start):
            expected = log_probs[at - 1, sample["tokens"][at]].item() if on else 0.0
            assert stored == pytest.approx(expected, abs=1e-4)
    assert any(0 in sample["loss_mask"] for sample in samples)


@pytest.mark.slow
def test_random_lengths_are_kept_by_the_engine(url: str, tmp_path: Path) -> None:
    flags = ("--generate-min-length", "5", "--generate-max-length", "30")
    samples = run(url, tmp_path / "out", "random_length", *flags)
    assert [sample["response_length"] for sample in samples] == [s["metadata"]["random_length"] for s in samples]
    assert {sample["status"] for sample in samples} == {"truncated"}


@pytest.mark.slow
def test_single_turn_is_cut_by_the_context(url: str, tmp_path: Path) -> None:
    samples = run(url, tmp_path / "out", "single_turn", "--max-seq-len", "40")
    assert all(len(sample["tokens"]) <= 40 or not sample["response_length"] for sample in samples)
    assert {sample["status"] for sample in samples} <= {"completed", "truncated"}
    assert any(sample["response_length"] for sample in samples)
