"""GRPO on the tiny model, as its example does it: the arithmetic, and short runs with the real engine and sessions."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from miles_core import Sample

TINY = Path(__file__).parents[2] / "examples" / "tiny"
MODULES = ("curve", "grpo", "serving", "task", "train")


@pytest.fixture(scope="module")
def example() -> Iterator[dict[str, Any]]:
    """The example's modules, by name; they are no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TINY)
        yield {name: importlib.import_module(name) for name in MODULES}
        for name in MODULES:
            patch.delitem(sys.modules, name)


@pytest.fixture(scope="module")
def network() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY / "model", dtype=torch.float32).eval()


def sampled_from(network: Any, group: int, lengths: tuple[int, ...], rewards: tuple[float, ...]) -> list[Sample]:
    """Samples with the model's own log-probs: a prompt of 12 ids, then 5 sampled, 3 of a tool, the rest sampled."""
    draw = torch.Generator().manual_seed(group)
    prompt = torch.randint(0, 256, (12,), generator=draw).tolist()
    samples = []
    for at, (length, reward) in enumerate(zip(lengths, rewards, strict=True)):
        tokens = prompt + torch.randint(0, 256, (length,), generator=draw).tolist()
        with torch.no_grad():
            every = network(torch.tensor([tokens])).logits[0].log_softmax(-1)
        mask = [int(not 5 <= place < 8) for place in range(length)]
        log_probs = [every[11 + place, tokens[12 + place]].item() * on for place, on in enumerate(mask)]
        fields: dict[str, Any] = {"tokens": tokens, "loss_mask": mask, "rollout_log_probs": log_probs}
        samples.append(Sample(group_index=group, index=at, response_length=length, reward=reward, **fields))
    return samples


def log_prob(network: Any, sample: Sample) -> float:
    """Of all its sampled tokens together."""
    ids = torch.tensor([sample.tokens])
    with torch.no_grad():
        every = network(ids).logits[0].log_softmax(-1)
    chosen = every[:-1].gather(-1, ids[0, 1:, None])[:, 0][-sample.response_length :]
    return chosen[torch.tensor(sample.loss_mask, dtype=torch.bool)].sum().item()


def test_advantages_are_of_the_group(example: dict[str, Any]) -> None:
    rewards = [(0, 1.0), (1, 0.5), (0, 0.0), (1, 0.5), (0, 0.0), (0, 1.0)]
    samples = [Sample(group_index=group, index=at, reward=reward) for at, (group, reward) in enumerate(rewards)]
    assert example["grpo"].advantages_of(samples) == pytest.approx([1, 0, -1, 0, -1, 1])


def test_an_update_follows_the_advantages_and_saves_what_an_engine_loads(
    example: dict[str, Any], network: Any, tmp_path: Path
) -> None:
    good, bad = sampled_from(network, 0, (30, 21), (1.0, 0.0))
    same = sampled_from(network, 1, (14, 40, 9), (1.0, 1.0, 1.0))
    trainer = example["grpo"].Trainer(TINY / "model", 4e-4, 1)
    update = trainer.update([good, *same, bad])
    assert update.difference < 1e-4
    assert update.tokens == sum(sum(each.loss_mask or ()) for each in (good, bad, *same))
    trainer.save(tmp_path / "model")
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    # both are noise to the model, so that learning one makes the other likelier too: what counts is the gap
    assert log_prob(trained, good) - log_prob(trained, bad) > log_prob(network, good) - log_prob(network, bad) + 1.0
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "model" / name).read_bytes() == (TINY / "model" / name).read_bytes()


def test_a_steps_groups_are_dealt_whole_to_its_updates(example: dict[str, Any], network: Any) -> None:
    grpo = example["grpo"]
    samples = [
        sample for group in (7, 2, 4) for sample in sampled_from(network, group, (9 + group, 12, 20), (1.0, 0.0, 1.0))
    ]
    trainer = grpo.Trainer(TINY / "model", 3e-4, 4)
    parts = [sorted(int(batch.sampled.sum()) for batch in part) for part in trainer._parts(samples)]
    tokens = {group: sum(sum(s.loss_mask or ()) for s in samples if s.group_index == group) for group in (2, 4, 7)}
    assert parts == [[tokens[2] + tokens[7]], [tokens[4]]]
    steps: list[float] = []
    trainer._optimizer.register_step_post_hook(lambda *_: steps.append(trainer._optimizer.param_groups[0]["lr"]))
    trainer.update(samples)
    assert len(steps) == grpo.UPDATES == 2


def test_equal_rewards_teach_nothing(example: dict[str, Any], network: Any, tmp_path: Path) -> None:
    trainer = example["grpo"].Trainer(TINY / "model", 1e-3, 1)
    update = trainer.update(sampled_from(network, 0, (30, 21), (1.0, 1.0)))
    assert (update.gradient, update.tokens) == (0.0, 45)
    assert_weights(trainer, tmp_path, same=True)


@pytest.mark.parametrize("wrong", [2e-3, float("nan")])
def test_log_probs_of_other_weights_are_refused(
    example: dict[str, Any], network: Any, tmp_path: Path, wrong: float
) -> None:
    samples = sampled_from(network, 0, (30, 21, 25), (1.0, 0.0, 1.0))
    log_probs = samples[2].rollout_log_probs
    assert log_probs is not None
    log_probs[-1] += wrong
    trainer = example["grpo"].Trainer(TINY / "model", 1e-3, 1)
    with pytest.raises(example["grpo"].OffPolicyError, match=r"differ by (0\.002|inf), at most 0\.001 is expected"):
        trainer.update(samples)
    assert_weights(trainer, tmp_path, same=True)


def assert_weights(trainer: Any, folder: Path, *, same: bool) -> None:
    """The trainer's weights are the committed ones, or are not."""
    trainer.save(folder / "model")
    before, after = (load_file(at / "model.safetensors") for at in (TINY / "model", folder / "model"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before) is same


def test_fresh_prompts_are_not_held_out(example: dict[str, Any]) -> None:
    make = example["task"].make_prompts
    held_out = {line["metadata"]["expression"] for line in make(2000, example["train"].random.Random(1))}
    fresh = make(2000, example["train"].random.Random(1), held_out)
    assert held_out.isdisjoint(line["metadata"]["expression"] for line in fresh)


def test_the_drawing_is_well_formed_from_one_step_on(example: dict[str, Any], tmp_path: Path) -> None:
    curve = example["curve"].Curve({"steps": 30}, before=[0.5, 1.0])
    for number in range(1, 31):
        curve.steps.append(
            example["curve"].Step(
                step=number, reward=number / 40, samples=8, tokens=100, difference=1e-6 * (number % 3), gradient=0.1,
                rollout_seconds=1.0, update_seconds=1.0,
            )
        )  # fmt: skip
        curve.write(tmp_path)
        drawn = ElementTree.parse(tmp_path / "curve.svg").getroot()
        dots = [each for each in drawn.iter() if each.tag.endswith("circle")]
        assert len(dots) == 2 * number
        assert all(0 <= float(dot.get("cx", -1)) <= 640 and 0 <= float(dot.get("cy", -1)) <= 450 for dot in dots)
    curve.after = [1.0, 1.0]
    curve.write(tmp_path)
    assert json.loads((tmp_path / "curve.json").read_text())["held_out"]["rise"] == 0.25
    assert "held out 1.000" in (tmp_path / "curve.svg").read_text()


# -- as a user runs it ---------------------------------------------------------------------------------------


def run(*arguments: object, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TINY / "train.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steps", 0), "argument --steps: must be at least 1, got 0"),
        (("--samples", 1), "argument --samples: must be at least 2, got 1"),
        (("--rate", "0"), "argument --rate: must be between 0 and 1, got 0"),
        (("--prompts", "x"), "argument --prompts: expected a whole number, got x"),
        (("--held-out", 65), "argument --held-out: must be at most 64, got 65"),
        (("--step", 1), "unrecognized arguments: --step 1"),
    ],
)
def test_a_wrong_flag(arguments: tuple[object, ...], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_the_model_to_start_from_is_not_written_over() -> None:
    done = run("--out", TINY)
    assert (done.returncode, done.stderr) == (
        1,
        f"error: --out {TINY}: its model/ is the model to start from; choose another folder\n",
    )


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run("--out", tmp_path / "file" / "out")
    assert done.returncode == 1
    assert done.stderr == f"error: --out {tmp_path}/file/out: cannot be made: Not a directory\n"


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    done = run("--out", tmp_path, "--model", tmp_path / "none")
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: --model {tmp_path}/none: does not exist")


def test_what_is_not_installed(
    example: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: there(name) if name == "transformers" else None)
    assert example["train"].main(["--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "error: training needs torch, openai: pip install 'miles-plugins[local,agents]'\n"


@pytest.mark.slow
def test_a_short_run_trains_on_policy_and_leaves_a_model_and_its_curve(tmp_path: Path) -> None:
    done = run(
        "--steps", 2, "--prompts", 4, "--samples", 8, "--held-out", 4, "--held-out-samples", 2, "--rate", "5e-4",
        "--out", tmp_path / "out",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    curve = json.loads((tmp_path / "out" / "curve.json").read_text())
    assert [step["step"] for step in curve["steps"]] == [1, 2]
    # at step 2 the engine has the weights of step 1, which are the trainer's to the last bit
    assert all(0 < step["difference"] < 1e-4 for step in curve["steps"])
    assert all(step["tokens"] > 1000 and step["samples"] == 32 for step in curve["steps"])
    assert len(curve["held_out"]["prompts_after"]) == 4
    ElementTree.parse(tmp_path / "out" / "curve.svg")
    assert "held out, before: " in done.stdout
    assert "held out, after: " in done.stdout
    before, after = (load_file(at / "model" / "model.safetensors") for at in (TINY, tmp_path / "out"))
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_an_engine_that_kept_its_weights_is_found_out(
    example: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says the new version's name, so that nothing but the log-probs tells."""
    post = example["serving"]._post

    def rename(url: str, body: dict[str, Any]) -> None:
        post(url.replace("update_weights_from_disk", "update_weight_version"), {"new_version": body["weight_version"]})

    monkeypatch.setattr(example["serving"], "_post", rename)
    monkeypatch.setattr(example["grpo"], "reward_of", lambda sample: float(sample.index % 2))  # there is much to learn
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    few = ["--prompts", "2", "--samples", "4", "--held-out", "1", "--held-out-samples", "1"]
    code = example["train"].main(["--steps", "2", *few, "--out", str(tmp_path)])
    assert code == 1
    printed = capsys.readouterr()
    assert "error: log-probs of the trainer and the rollout differ by " in printed.err
    assert len(json.loads((tmp_path / "curve.json").read_text())["steps"]) == 1
