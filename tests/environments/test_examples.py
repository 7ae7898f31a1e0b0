"""The example packages of third parties: listed, checked, tested, and used in rollouts with the tiny model's tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.distributions import ROOT
from helpers.environments import Installed
from helpers.pages import blocks_of
from helpers.walk import Stage, Walk

pytestmark = pytest.mark.slow

EXAMPLES = {
    "qwen25": "family",
    "double_check": "agent",
    "any_id": "matcher",
    "rejection": "generator",
    "distinct": "sample-hook",
    "dice": "engine",
}
TINY = ROOT / "examples" / "tiny"


def rollout(installed: Installed, output: Path, *arguments: str) -> list[dict[str, Any]]:
    """The samples of a small run."""
    done = installed.env.miles(
        "rollout", "--prompts", TINY / "prompts.jsonl", "--limit", "3", "--output", output, "--checkpoint",
        TINY / "model", "--seed", "1", "--max-tokens", "40", "--no-progress", *arguments,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]


def test_each_is_listed_under_its_distribution(installed: Installed) -> None:
    listed = json.loads(installed.env.miles("list", "--json").stdout)["plugins"]
    found = {plugin["name"]: plugin for plugin in listed if plugin["distribution"].startswith("acme-")}
    assert {name: plugin["kind"] for name, plugin in found.items()} == EXAMPLES
    assert {plugin["state"] for plugin in found.values()} == {"found"}
    assert set(installed.examples) == set(EXAMPLES)


def test_each_passes_check(installed: Installed) -> None:
    done = installed.env.miles("check", *EXAMPLES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("6 plugins checked, none failed\n")


@pytest.mark.parametrize("name", EXAMPLES)
def test_its_own_tests_pass(installed: Installed, name: str) -> None:
    done = installed.env.pytest(installed.examples[name])
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_family_fits_a_checkpoint_with_its_tokens(installed: Installed) -> None:
    model = TINY / "model"
    done = installed.env.miles("verify", "template", "--checkpoint", model, "--tito-model", "qwen25", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["ok"], found["counts"]["fail"]) == (0, True, 0), found["verdict"]


def test_a_rollout_of_third_parties_alone(installed: Installed, tmp_path: Path) -> None:
    samples = rollout(
        installed, tmp_path, "--agent", "double_check", "--tito-model", "qwen25", "--engine", "dice",
        "--message-matcher", "any_id",
    )  # fmt: skip
    assert len(samples) == 3
    for sample in samples:
        assert sample["status"] in ("completed", "truncated")
        assert sample["weight_versions"] == ["dice"] * len(sample["weight_versions"])
        assert "changed_its_mind" in sample["metadata"]
        pairs = zip(sample["loss_mask"], sample["rollout_log_probs"], strict=True)
        assert all((value < 0) == bool(on) for on, value in pairs)
        assert sample["metadata"]["tito_session_mismatch"] == [] or all(
            one["type"] == "assistant_text" for one in sample["metadata"]["tito_session_mismatch"]
        )


def test_the_sample_hook_picks_the_leaves_of_a_tree(installed: Installed, tmp_path: Path) -> None:
    samples = rollout(
        installed, tmp_path, "--agent", "double_check", "--tito-model", "qwen25", "--engine", "dice", "--history",
        "tree", "--pick-samples", "distinct",
    )  # fmt: skip
    assert len(samples) >= 3
    assert len({tuple(sample["tokens"]) for sample in samples}) == len(samples)
    assert all("leaf" in sample["metadata"] for sample in samples)
    recorded = json.loads((tmp_path / "run.json").read_text())
    assert recorded["settings"]["sample_hooks"] == ["distinct", "shared_prefix_mask"]


def test_the_generator_tries_again_with_a_flag_of_its_own(installed: Installed, tmp_path: Path) -> None:
    samples = rollout(
        installed, tmp_path, "--generate", "rejection", "--attempts", "2", "--tito-model", "qwen25", "--engine", "dice"
    )
    assert [sample["metadata"]["attempts"] for sample in samples if not sample["reward"]]
    assert {sample["metadata"]["attempts"] for sample in samples if not sample["reward"]} == {2}


def test_the_tiny_model_works_with_a_third_partys_family_and_agent(installed: Installed, tmp_path: Path) -> None:
    samples = rollout(
        installed, tmp_path, "--agent", "double_check", "--tito-model", "qwen25", "--engine", "local", "--model",
        str(TINY / "model"),
    )  # fmt: skip
    assert len(samples) == 3
    assert all(len(sample["weight_versions"]) == 2 for sample in samples if sample["status"] == "completed")


def test_the_readme_works_as_it_is_written(installed: Installed, tmp_path: Path) -> None:
    blocks = list(blocks_of(ROOT / "examples" / "plugins" / "README.md"))
    with Walk(tmp_path, Stage(path=(installed.env.path / "bin",))) as walk:
        for block in blocks:
            walk.follow(block)
    assert (tmp_path / "dice-rollout" / "samples.jsonl").exists()
