"""Samples as trainers take them."""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_core.rollout import compat
from miles_core.rollout.trainers import to_miles, to_trl, to_verl
from miles_core.types import Sample, SampleStatus

TINY = Path(__file__).parents[2] / "examples" / "tiny" / "model"


def sample(index: int, **fields: Any) -> Sample:
    """Two prompt tokens, then two sampled, a tool's one, and two sampled."""
    return Sample(
        **{
            "group_index": index // 2,
            "index": index,
            "tokens": [10, 11, 20 + index, 21, 30, 22, 23],
            "response_length": 5,
            "loss_mask": [1, 1, 0, 1, 1],
            "rollout_log_probs": [-0.1, -0.2, 0.0, -0.4, -0.5],
            "reward": float(index),
            "status": SampleStatus.COMPLETED,
            **fields,
        }
    )


def test_trl_gets_prompts_completions_and_the_mask() -> None:
    assert to_trl([sample(0), sample(1, reward=None)]) == {
        "prompt_ids": [[10, 11], [10, 11]],
        "completion_ids": [[20, 21, 30, 22, 23], [21, 21, 30, 22, 23]],
        "logprobs": [[-0.1, -0.2, 0.0, -0.4, -0.5]] * 2,
        "env_mask": [[1, 1, 0, 1, 1]] * 2,
        "reward": [0.0, None],
    }


def test_samples_may_come_one_by_one() -> None:
    assert to_trl(sample(at) for at in range(2)) == to_trl([sample(0), sample(1)])


def test_verl_gets_the_fields_of_an_agent_loop_output() -> None:
    experts = np.zeros((6, 1, 1), dtype=np.int32)
    first, second = to_verl(
        [sample(0, rollout_routed_experts=experts, non_generation_time=1.5), sample(1, reward={"score": 2, "len": 7})],
        reward_key="score",
    )
    assert first.pop("routed_experts") is experts
    assert first == {
        "prompt_ids": [10, 11],
        "response_ids": [20, 21, 30, 22, 23],
        "response_mask": [1, 1, 0, 1, 1],
        "response_logprobs": [-0.1, -0.2, 0.0, -0.4, -0.5],
        "reward_score": 0.0,
        "num_turns": 2,
        "metrics": {"tool_calls": 1.5},
        "extra_fields": {},
    }
    assert (second["reward_score"], second["extra_fields"]) == (2.0, {"reward_extra_info": {"score": 2, "len": 7}})


def test_miles_gets_groups_in_order() -> None:
    groups = to_miles([sample(3), sample(0), sample(2), sample(1)])
    assert [[each.index for each in group] for group in groups] == [[2, 3], [0, 1]]
    with compat.enabled():
        theirs = importlib.import_module("miles.utils.types").Sample
        assert all(isinstance(each, theirs) for group in to_miles([sample(0)]) for each in group)


def test_miles_own_class_is_used_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "miles" / "utils").mkdir(parents=True)
    (tmp_path / "miles" / "utils" / "types.py").write_text(
        "class Sample:\n    @classmethod\n    def from_dict(cls, data):\n"
        "        made = cls()\n        made.__dict__.update(data)\n        return made\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        ((made,),) = to_miles([sample(1)])
        assert type(made).__module__ == "miles.utils.types"
        assert (made.index, made.loss_mask, made.status) == (1, [1, 1, 0, 1, 1], "completed")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "miles"]:
            del sys.modules[name]


def test_a_sample_to_remove_trains_nothing() -> None:
    removed = sample(0, remove_sample=True)
    assert to_trl([removed])["env_mask"] == [[0] * 5]
    assert to_verl([removed])[0]["response_mask"] == [0] * 5


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"response_length": 0, "loss_mask": [], "rollout_log_probs": []}, "sample 4 .completed. has no response"),
        ({"rollout_log_probs": None}, "sample 4 has no rollout_log_probs; none are made up"),
        ({"reward": {"a": 1}}, "the reward of sample 4 has a; name one as reward_key"),
        ({"loss_mask": [1]}, "loss_mask has 1 entries"),
    ],
)
def test_what_cannot_be_trained_on_is_named(fields: dict[str, Any], text: str) -> None:
    for convert in (to_trl, to_verl):
        with pytest.raises(ValueError, match=text):
            convert([sample(4, **fields)])


STEP = """
import json, sys
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from miles_core.rollout.trainers import to_trl
from miles_core.types import Sample

model, samples, out = sys.argv[1:]
samples = [Sample.from_dict(one) for one in json.load(open(samples))]
tokenizer = AutoTokenizer.from_pretrained(model)
trainer = GRPOTrainer(
    model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
    args=GRPOConfig(output_dir=out, per_device_train_batch_size=2, num_generations=2, max_steps=1, report_to=[],
                    use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no", disable_tqdm=True),
    processing_class=tokenizer,
    reward_funcs=[lambda reward, **_: reward],
    train_dataset=Dataset.from_list([{"prompt": "x"}] * 2),
    rollout_func=lambda prompts, trainer: to_trl(samples),
)
score = trainer._generate_and_score_completions
seen = {}
trainer._generate_and_score_completions = lambda inputs: seen.setdefault("batch", score(inputs))
trainer.train()
batch = seen["batch"]
for at, sample in enumerate(samples):
    length = sample.response_length
    assert batch["completion_ids"][at][:length].tolist() == sample.tokens[-length:]
    trained = batch["tool_mask"][at] * batch["completion_mask"][at]
    assert trained.sum() == sum(sample.loss_mask) and trained[:length].tolist() == sample.loss_mask
    logps = batch["sampling_per_token_logps"][at][:length].tolist()
    assert all(abs(a - b) < 1e-6 for a, b in zip(logps, sample.rollout_log_probs))
assert batch["advantages"][0] < 0 < batch["advantages"][1]
print("one step of", trainer.state.global_step)
"""


CACHE = Path(__file__).parents[2] / ".cache" / "trainers"


def environment(*installs: list[str]) -> Path:
    """A virtual environment that lends the libraries of this one, and has what is installed; gives its Python.

    It is made once, and made anew when what it has or lends is another.
    """
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    lent = "\n".join([*libraries, str(Path(compat.__file__).parents[3])])
    folder = CACHE / hashlib.sha256(f"{sys.version_info[:2]}{lent}{installs}".encode()).hexdigest()[:16]
    python, done = folder / "bin" / "python", folder / "installed"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
            venv.EnvBuilder(symlinks=True).create(folder)
            (site,) = (folder / "lib").glob("python*/site-packages")
            (site / "libraries.pth").write_text(lent)
            pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-compile"]
            for words in installs:
                subprocess.run([*pip, *words], check=True, timeout=400)
            done.touch()
    return python


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_trl_takes_a_step(tmp_path: Path) -> None:
    """The released package, in an environment of its own that lends the libraries of this one."""
    python = environment(["trl==1.16.0"])
    (tmp_path / "samples.json").write_text(json.dumps([sample(0).to_dict(), sample(1).to_dict()]))
    (tmp_path / "step.py").write_text(STEP)
    command = [python, tmp_path / "step.py", TINY, tmp_path / "samples.json", tmp_path / "out"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "one step of 1" in done.stdout


VERL = """
import json, sys
import numpy as np
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from miles_core.rollout.trainers import to_verl
from miles_core.types import Sample

samples = [Sample.from_dict(each) for each in json.load(open(sys.argv[1]))]
samples[0].rollout_routed_experts = np.arange(12, dtype=np.int32).reshape(6, 2, 1)
outputs = [AgentLoopOutput(**one) for one in to_verl(samples)]
assert set(to_verl(samples)[0]) <= set(AgentLoopOutput.model_fields)
for sample, output in zip(samples, outputs):
    batch = output.as_dict()
    length = sample.response_length
    assert batch["prompts"].tolist() + batch["responses"].tolist() == sample.tokens
    assert batch["responses"].tolist() == sample.tokens[-length:]
    assert batch["response_mask"].tolist() == sample.loss_mask
    assert np.allclose(batch["rollout_log_probs"].tolist(), sample.rollout_log_probs)
    assert batch["rm_scores"].tolist() == [0.0] * (length - 1) + [sample.reward]
    assert output.num_turns == 2
experts = outputs[0].as_dict()["routed_experts"]
assert experts[:6].flatten().tolist() == list(range(12)) and not experts[6].any()
print("took", len(outputs))
"""

NEEDED_BY_VERL = ["tensordict>=0.8,<=0.10,!=0.9.0", "ray>=2.41", "hydra-core", "codetiming", "dill", "pandas"]
NEEDED_BY_VERL += ["datasets", "pillow", "cachetools"]
"""What its agent loop imports; it declares more, for training on GPUs."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_verl_takes_what_its_agent_loop_gives(tmp_path: Path) -> None:
    """The released package's own class, and the tensors that it makes."""
    python = environment(["--no-deps", "verl==0.9.1"], NEEDED_BY_VERL)
    (tmp_path / "samples.json").write_text(json.dumps([sample(0).to_dict(), sample(1).to_dict()]))
    (tmp_path / "take.py").write_text(VERL)
    command = [python, tmp_path / "take.py", tmp_path / "samples.json"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "took 2" in done.stdout
