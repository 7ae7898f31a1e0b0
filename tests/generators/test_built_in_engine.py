"""The generate functions over `/generate`, from the command line, with the real engine and the tiny model."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from helpers import arithmetic
from miles_core.cli import main
from miles_core.engine.base import EngineConfig
from miles_core.plugins import Registry
from miles_core.rollout.data import read_prompts
from miles_core.rollout.engines import Engines
from miles_core.rollout.state import RolloutArgs, RolloutState
from miles_core.server.parts import load_family
from miles_core.types import GenerateFnInput, Sample, SampleStatus
from miles_generators.multi_turn import generate

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
    monkeypatch.setitem(sys.modules, "tiny_tools", arithmetic)
    samples = run(
        url, tmp_path / "out", "multi_turn", "--generate-tool-specs-path", "tiny_tools.TOOLS",
        "--generate-execute-tool-function-path", "tiny_tools.execute",
    )  # fmt: skip
    right = [f"The answer is {sample['label']}." in sample["response"] for sample in samples]
    assert sum(right) >= 3
    for sample in samples:
        check_log_probs(sample["tokens"], sample["loss_mask"], sample["rollout_log_probs"])
    assert any(0 in sample["loss_mask"] for sample in samples)


@cache
def network() -> Any:
    """The tiny model, as `transformers` runs it."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TINY / "model", dtype=torch.float32).eval()


def check_log_probs(tokens: list[int], mask: list[int], log_probs: list[float]) -> None:
    """Every token that is trained on has the log-probability that the model gives it there; all others have none."""
    import torch

    with torch.no_grad():
        found = torch.log_softmax(network()(torch.tensor([tokens])).logits[0].float(), dim=-1)
    for at, (on, stored) in enumerate(zip(mask, log_probs, strict=True), len(tokens) - len(mask)):
        assert stored == pytest.approx(found[at - 1, tokens[at]].item() if on else 0.0, abs=1e-4)


LIMITS = [
    {},
    {"max_new_tokens": 9},
    {"max_new_tokens": 30},
    {"window": 0},
    {"window": 8},
    {"window": 50},
    {"window": 90, "max_new_tokens": 40},
]


@pytest.mark.slow
async def test_a_sample_that_is_stopped_anywhere_is_the_one_that_never_was(url: str) -> None:
    """Aborts, length stops and a full context, on what the model itself says; one seed is one sample."""
    family, _ = load_family(Registry.discover(), "qwen3", str(TINY / "model"), None)
    draw, aborts, turns = random.Random(4), 0, 0
    for number, prompt in enumerate(read_prompts(TINY / "prompts.jsonl")[: len(LIMITS)]):
        limits = LIMITS[number % len(LIMITS)]
        begun = Sample(index=number, prompt=prompt.messages)
        length = len(prompt_ids := family.encode(family.render(prompt.messages, arithmetic.TOOLS)))
        args = RolloutArgs(rollout_max_context_len=length + limits["window"] if "window" in limits else None)
        args.add({"generate_tool_specs_path": "helpers.arithmetic.TOOLS", "generate_max_turns": 4})
        args.add({"generate_execute_tool_function_path": "helpers.arithmetic.execute"})
        state = RolloutState(args, family=family, engines=Engines([url]))
        params = {"max_new_tokens": limits.get("max_new_tokens", 200), "sampling_seed": number}
        whole = await rolled(state, begun, params)
        sample = Sample(index=number, prompt=prompt.messages)
        while not sample.response_length or sample.status is SampleStatus.ABORTED:
            stop = asyncio.create_task(stopping(state, draw.choice([0.02, 0.05, 0.1, 0.3, 2.0])))
            sample = await rolled(state, Sample.from_dict(sample.to_dict()), params)
            stop.cancel()
            resumed(state)
            aborts += sample.status is SampleStatus.ABORTED
            if sample.status is SampleStatus.TRUNCATED:
                break
        assert (sample.tokens, sample.loss_mask, sample.status) == (whole.tokens, whole.loss_mask, whole.status)
        assert sample.tokens[:length] == prompt_ids
        for each in (sample, whole):
            assert each.loss_mask is not None
            assert each.rollout_log_probs is not None
            check_log_probs(each.tokens, each.loss_mask, each.rollout_log_probs)
            assert len(each.tokens) <= (args.rollout_max_context_len or 2048)
        turns += 0 in (whole.loss_mask or ())
    assert aborts > 2
    assert turns > 0


async def rolled(state: RolloutState, sample: Sample, params: dict[str, Any]) -> Sample:
    """What the generate function makes of a sample."""
    (given,) = (await generate(GenerateFnInput(state, sample, dict(params)))).as_list()
    given.validate()
    return given


async def stopping(state: RolloutState, delay: float) -> None:
    """Stop the engine's work after a while, as the end of a run does."""
    await asyncio.sleep(delay)
    state.aborted = True
    assert state.engines is not None
    await state.engines.stop()


def resumed(state: RolloutState) -> None:
    """The next run."""
    state.aborted = False
    assert state.engines is not None
    state.engines.resume()


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
