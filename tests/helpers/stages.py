"""What the pages of the documentation take for granted, and what a reader puts in the place of their words."""

from __future__ import annotations

from collections.abc import Mapping

from helpers.fake_sglang import write_fake_sglang
from helpers.pages import ROOT
from helpers.walk import Stage

ENGINE = "miles-plugins engine --engine local --model examples/tiny/model --tito-model qwen3 --port 30000"
"""What listens at the address of examples that take a running SGLang."""

CHECKPOINT = """
cp -r examples/tiny/model checkpoint
templates=$(python -c 'import miles_tito_families; print(miles_tito_families.__path__[0])')/templates
cp "$templates/qwen3.jinja" checkpoint/chat_template.jinja
"""
"""A checkpoint of ours that brings a chat template, as most do."""

STAGES: Mapping[str, Stage] = {
    "docs/environments.md": Stage(servers=("python examples/environments/",)),
    "docs/families.md": Stage(
        stands_for={"DIR": "checkpoint", "FILE": "checkpoint/chat_template.jinja"}, before=(CHECKPOINT, ENGINE)
    ),
    "docs/index.md": Stage(before=(ENGINE,)),
    "docs/operations.md": Stage(
        before=(CHECKPOINT, *(ENGINE.replace("30000", port) for port in ("30007", "30008", "30010"))),
        stands_for={
            "./Qwen3-4B": "checkpoint",
            "http://10.0.0.7:30000": "http://127.0.0.1:30007",
            "http://10.0.0.8:30000": "http://127.0.0.1:30008",
            "http://10.0.0.10:30000": "http://127.0.0.1:30010",
            "/checkpoints/step-120": "checkpoint",
        },
        environ={"MILES_ADMIN_API_KEY": "the admin key"},
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
    "README.md": Stage(stands_for={"DIR": "checkpoint"}, before=(CHECKPOINT,)),
}

ELSEWHERE: Mapping[str, str] = {
    "docs/write_a_plugin.md": "tests/environments/test_write_a_plugin.py, in an environment of its own",
    "examples/plugins/README.md": "tests/environments/test_examples.py, where its packages are installed",
}
"""Pages that are followed by another test."""
