"""The main job, run as a user runs it: prompts in, training samples out, every claim about them checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from miles_core.tito import Tokenizer, load_tokenizer

TINY = Path(__file__).parents[2] / "examples" / "tiny"
PROMPTS = 12


def run_rollout(output: Path, *extra: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable, "-m", "miles_core", "rollout", "--prompts", str(TINY / "prompts.jsonl"),
        "--limit", str(PROMPTS),
        "--agent", "calculator", "--tito-model", "qwen3", "--engine", "local", "--model", str(TINY / "model"),
        "--samples-per-prompt", "4", "--output", str(output), "--no-progress", *extra,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rollout") / "out"
    done = run_rollout(folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def samples(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(TINY / "model")


def trained_spans(sample: dict[str, Any]) -> list[list[int]]:
    """The sampled ids, one list per run of ones in the loss mask."""
    response = sample["tokens"][len(sample["tokens"]) - sample["response_length"] :]
    spans: list[list[int]] = []
    previous = 0
    for token, mask in zip(response, sample["loss_mask"], strict=True):
        if mask and not previous:
            spans.append([])
        if mask:
            spans[-1].append(token)
        previous = mask
    return spans


def test_every_sample_is_there_once_and_consistent(samples: list[dict[str, Any]]) -> None:
    keys = {(s["prompt_index"], s["sample_index"]) for s in samples}
    assert len(samples) == len(keys) == PROMPTS * 4
    for sample in samples:
        lengths = {len(sample["loss_mask"]), len(sample["rollout_log_probs"]), sample["response_length"]}
        assert len(lengths) == 1
        assert sample["response_length"] <= len(sample["tokens"])
        assert sample["metadata"]["tito_session_mismatch"] == [] or all(
            d["type"] == "assistant_text" for d in sample["metadata"]["tito_session_mismatch"]
        )
        assert all(p == 0.0 for p, m in zip(sample["rollout_log_probs"], sample["loss_mask"], strict=True) if not m)


def test_the_model_solves_most_tasks_and_not_all(samples: list[dict[str, Any]]) -> None:
    rewards = [s["reward"] for s in samples]
    assert 0.5 < sum(rewards) / len(rewards) < 0.95
    assert any(sum(len(span) > 0 for span in trained_spans(s)) >= 3 for s in samples), "no sample took several turns"


def test_the_model_gives_the_stored_log_probs_on_every_trained_token(samples: list[dict[str, Any]]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TINY / "model", dtype=torch.float32).eval()
    worst = 0.0
    for sample in samples:
        ids = torch.tensor([sample["tokens"]])
        with torch.no_grad():
            log_probs = torch.log_softmax(model(ids).logits[0].float(), dim=-1)
        start = len(sample["tokens"]) - sample["response_length"]
        for offset, (mask, stored) in enumerate(zip(sample["loss_mask"], sample["rollout_log_probs"], strict=True)):
            if mask:
                at = start + offset
                worst = max(worst, abs(log_probs[at - 1, sample["tokens"][at]].item() - stored))
    assert worst < 1e-4


def test_trained_spans_are_what_the_model_said_and_nothing_else(
    samples: list[dict[str, Any]], tokenizer: Tokenizer
) -> None:
    for sample in samples:
        spans = [tokenizer.decode(span) for span in trained_spans(sample)]
        assert len(spans) == len(sample["weight_versions"])
        for text in spans:
            assert "<|im_start|>" not in text
            assert "<tool_response>" not in text
            assert text.count("<|im_end|>") <= 1


def test_a_second_run_repeats_nothing(output: Path) -> None:
    before = (output / "samples.jsonl").read_bytes()
    done = run_rollout(output)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (output / "samples.jsonl").read_bytes() == before


def test_the_summary_agrees_with_the_samples(output: Path, samples: list[dict[str, Any]]) -> None:
    summary = json.loads((output / "summary.json").read_text())
    assert summary["samples"] == len(samples)
