"""What the pages of the documentation take for granted, and what a reader puts in the place of their words."""

from __future__ import annotations

from collections.abc import Mapping

from helpers.fake_sglang import write_fake_sglang
from helpers.pages import ROOT
from helpers.walk import ENGINE, Stage

RUNNING = f"{ENGINE} 30000"
"""What listens at the address of examples that take a running SGLang."""

OTHER_ENGINES = "python -m miles_core.testing.fake_engine --port"
"""What listens at the addresses of further ones, of which nothing is asked but that they answer."""

FEW = "".join((ROOT / "examples/tiny/prompts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[:4])
"""As many of the tiny model's prompts as show that a rollout works."""

OTHER_FAMILIES = "deepseekv32,deepseekv4,glm47,inkling,kimi25,kimi26,minimax_m25,minimax_m27,nemotron3,qwen35,qwennext"
"""Families whose checks take a second each; `tests/testing/test_builtins.py` has those of every built-in."""

CHECKPOINT = """
cp -r examples/tiny/model checkpoint
templates=$(python -c 'import miles_tito_families; print(miles_tito_families.__path__[0])')/templates
cp "$templates/qwen3.jinja" checkpoint/chat_template.jinja
"""
"""A checkpoint of ours that brings a chat template, as most do."""

STAGES: Mapping[str, Stage] = {
    "docs/environments.md": Stage(servers=("python examples/environments/",)),
    "docs/families.md": Stage(
        stands_for={"DIR": "checkpoint", "FILE": "checkpoint/chat_template.jinja"}, before=(CHECKPOINT, RUNNING)
    ),
    "docs/index.md": Stage(before=(RUNNING,)),
    "docs/operations.md": Stage(
        before=(CHECKPOINT, f"{ENGINE} 30007", f"{OTHER_ENGINES} 30008", f"{OTHER_ENGINES} 30010"),
        servers=(OTHER_ENGINES,),
        stands_for={
            "./Qwen3-4B": "checkpoint",
            "http://10.0.0.7:30000": "http://127.0.0.1:30007",
            "http://10.0.0.8:30000": "http://127.0.0.1:30008",
            "http://10.0.0.10:30000": "http://127.0.0.1:30010",
            "/checkpoints/step-120": "checkpoint",
        },
        environ={"MILES_ADMIN_API_KEY": "the admin key"},
        starts_engines=True,  # it pauses its engine, and gives it other weights
    ),
    "docs/performance.md": Stage(stands_for={".venv/bin/python benchmarks": f"python {ROOT}/benchmarks"}),
    "docs/sglang.md": Stage(
        before=(CHECKPOINT,),
        prepare=write_fake_sglang,
        stands_for={"DIR": "checkpoint", "Qwen/Qwen3-4B": "checkpoint", "10.0.0.1": "127.0.0.1"},
        environ={"CUDA_VISIBLE_DEVICES": "0,1,2,3"},
        ready="requests go to node 0",
    ),
    "examples/tiny/README.md": Stage(stands_for={"train-output/model": "examples/tiny/model"}),
    "README.md": Stage(
        files={"few.jsonl": FEW},
        stands_for={"DIR": "checkpoint", "examples/tiny/prompts.jsonl": "few.jsonl"},
        before=(CHECKPOINT,),
        environ={"MILES_PLUGINS_DISABLE": OTHER_FAMILIES},
        starts_engines=True,
    ),
}

ELSEWHERE: Mapping[str, str] = {
    "docs/write_a_plugin.md": "tests/environments/test_write_a_plugin.py, in an environment of its own",
    "examples/plugins/README.md": "tests/environments/test_examples.py, where its packages are installed",
}
"""Pages that are followed by another test."""
