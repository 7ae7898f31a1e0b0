"""`miles-plugins verify template`, run as a command."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from helpers.chat_tokenizer import write_checkpoint
from helpers.distributions import Site, distribution, module
from miles_core.testing.verify import TRAJECTORIES

OWN = resources.files("miles_tito_families").joinpath("templates/qwen3.jinja").read_text(encoding="utf-8")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BROKEN = '''"""Ends its turns without the line break that its template writes."""

import dataclasses

from miles_tito_families import qwen3


def tito_family():
    return dataclasses.replace(qwen3.FAMILY, name="acme", turn_end="<|im_end|>")
'''


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that carries the template that qwen3 follows."""
    directory = write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    (directory / "chat_template.jinja").write_text(OWN, "utf-8")
    return directory


def verify(*flags: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "miles_core", "verify", "template", *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, encoding="utf-8")


def as_json(*flags: str | Path, code: int = 0) -> dict[str, Any]:
    done = verify(*flags, "--json")
    assert (done.returncode, done.stderr) == (code, "")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_family_that_fits(checkpoint: Path) -> None:
    done = verify("--checkpoint", checkpoint, "--tito-model", "qwen3")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "family     qwen3@qwen3, the only one"
    assert lines[1].startswith("from       family qwen3 of miles-plugins ")
    assert lines[2] == "template   miles_tito_families/templates/qwen3.jinja"
    assert lines[3] == f"checkpoint {checkpoint}"
    assert "thinking on" in lines
    assert "thinking off" in lines
    rows = [line.split() for line in lines if line.startswith(("PASS ", "SKIP ", "FAIL ", "DIFFERS "))]
    assert len(rows) == 2 * len(TRAJECTORIES)
    head = next(line for line in lines if line.startswith("RESULT"))
    assert head.split() == ["RESULT", "TRAJECTORY", "APPEND", "JOINED", "CHECK", "PARSED"]
    assert all(len(line) <= 80 for line in lines[4:])
    assert "SKIP     answer without reasoning        thinking is off" in lines
    assert done.stdout.count("  pass     pass     pass     pass") == 2 * len(TRAJECTORIES) - 5
    probes = " ".join(" ".join(lines[-4:]).split())
    assert f"The template of {checkpoint} writes 16 of 16 probes as the family does" in probes
    assert lines[-1] == f"PASS: {len(rows) - 5} of {len(rows)} trajectories pass, 5 skipped"


def test_the_same_as_json(checkpoint: Path) -> None:
    answer = as_json("--checkpoint", checkpoint, "--tito-model", "qwen3@qwen3", "--thinking", "on")
    assert (answer["schema"], answer["ok"], answer["left_out"]) == (1, True, [])
    assert answer["family"]["name"] == "qwen3"
    assert answer["family"]["revision_chosen"] == "as named"
    assert answer["counts"] == {"pass": len(TRAJECTORIES), "differs": 0, "skip": 0, "fail": 0}
    first = answer["trajectories"][0]
    assert (first["name"], first["thinking"], first["outcome"]) == ("one answer", "on", "pass")
    checks = ["append-only", "joined", "self-check", "parsed"]
    assert [(check["name"], check["outcome"]) for check in first["checks"]] == [(name, "pass") for name in checks]
    assert answer["drift"]["differences"] == []
    assert answer["verdict"] == f"PASS: {len(TRAJECTORIES)} of {len(TRAJECTORIES)} trajectories pass"


def test_a_checkpoint_is_enough_where_its_family_is_plain(checkpoint: Path) -> None:
    done = verify("--checkpoint", checkpoint, "--thinking", "on")
    assert done.returncode == 0
    assert done.stdout.startswith("family     qwen3@qwen3")
    assert "--tito-model auto: taking qwen3" in done.stderr


def test_a_broken_family_of_somebody_elses_fails_in_context(site: Site, checkpoint: Path) -> None:
    distribution(site.path, "acme-families", groups={"miles.tito_families": {"acme": "acme_family"}})
    module(site.path, "acme_family", BROKEN)
    plugins = Path(OWN_PLUGINS)
    done = site.run(
        "verify",
        "template",
        "--checkpoint",
        str(checkpoint),
        "--tito-model",
        "acme",
        "--thinking",
        "on",
        path=[plugins],
    )
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1] == "from       family acme of acme-families 1.0"
    assert "FAIL     user after an answer            pass     fail     fail     pass" in lines
    at = lines.index("FAIL  user after an answer, thinking on")
    text = " ".join(" ".join(lines[at : at + 9]).split())
    assert "joined, turn 2: the joined prompt is not what the template writes for the whole conversation" in text
    assert "behind " in text
    assert "shelf 12.<|im_end|>'" in text
    assert "expected '\\n<|im_start|>user" in text
    assert "found '<|im_start|>user" in text
    assert any(line.endswith("more failed; --json has all of it") for line in lines)
    assert lines[-1].startswith("FAIL: ")
    assert " fail" in lines[-1]


OWN_PLUGINS = resources.files("miles_tito_families").joinpath("..")


# -- a template without a family ---------------------------------------------------------------------------------


def test_a_template_alone(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(CHATML, "utf-8")
    answer = as_json("--template", template)
    assert (answer["family"], answer["checkpoint"], answer["drift"]) == (None, None, None)
    assert answer["template"] == str(template)
    assert answer["counts"]["fail"] == 0
    assert {one["thinking"] for one in answer["trajectories"]} == {"none"}


def test_a_template_that_rewrites(tmp_path: Path, checkpoint: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages | length }}" + CHATML, "utf-8")
    for flags in ((), ("--checkpoint", checkpoint)):
        done = verify("--template", template, *flags)
        assert (done.returncode, done.stderr) == (1, "")
        assert "append-only, turn 1: appending user rewrites what stands before" in done.stdout
        assert "token 0, behind ''" in done.stdout
        verdict = done.stdout.splitlines()[-1]
        assert verdict.startswith("FAIL: 0 of ")
        assert "the template is not append-only on " in verdict


def test_the_checkpoints_own_template_through_default(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model")
    (directory / "chat_template.jinja").write_text("{{ bos_token }}" + CHATML, "utf-8")
    (directory / "tokenizer_config.json").write_text('{"bos_token": "<|endoftext|>"}', "utf-8")
    answer = as_json("--checkpoint", directory, "--tito-model", "default")
    assert (answer["ok"], answer["family"]["name"], answer["drift"]) == (True, "default", None)
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages | length }}" + CHATML, "utf-8")
    answer = as_json("--checkpoint", directory, "--tito-model", "default", "--template", template, code=1)
    assert answer["template"] == str(template)


# -- the checkpoint's own template -------------------------------------------------------------------------------


def drifted(tmp_path: Path) -> Path:
    directory = write_checkpoint(tmp_path / "model")
    (directory / "chat_template.jinja").write_text(OWN.replace("# Tools\n", "# Functions\n"), "utf-8")
    return directory


def test_a_changed_template_is_told_and_fails_when_strict(tmp_path: Path) -> None:
    directory = drifted(tmp_path)
    flags = ("--checkpoint", directory, "--tito-model", "qwen3", "--thinking", "on")
    done = verify(*flags)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    at = lines.index("  tool")
    assert lines[at + 1].startswith("    template '")
    assert "# Functions" in lines[at + 1]
    assert lines[at + 2].startswith("    family   '")
    assert "# Tools" in lines[at + 2]
    assert lines[-1].startswith("PASS, but the checkpoint's own template differs: ")
    answer = as_json(*flags, "--strict-template", code=1)
    assert answer["ok"] is False
    assert answer["counts"]["fail"] == 0
    assert answer["verdict"].startswith("FAIL, and the checkpoint's own template differs: ")
    found = answer["drift"]["differences"]
    assert "tool" in {one["probe"] for one in found}
    assert "# Functions" in found[0]["difference"]["actual"]
    assert "# Tools" in found[0]["difference"]["expected"]


def test_a_given_template_stands_in_for_the_checkpoints(tmp_path: Path, checkpoint: Path) -> None:
    template = tmp_path / "new.jinja"
    template.write_text(OWN.replace("# Tools\n", "# Functions\n"), "utf-8")
    answer = as_json("--checkpoint", checkpoint, "--tito-model", "qwen3", "--template", template, "--thinking", "on")
    assert answer["template"] == "miles_tito_families/templates/qwen3.jinja"
    assert answer["drift"]["template"] == str(template)
    assert answer["drift"]["differences"]


def test_nothing_to_compare_is_said(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model")
    done = verify("--checkpoint", directory, "--tito-model", "qwen3", "--thinking", "on", "--strict-template")
    assert done.returncode == 0
    text = " ".join(done.stdout.split())
    assert f"The checkpoint's own template was not compared: {directory} carries no chat template" in text


def run(*flags: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "miles_core", *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, encoding="utf-8")


def test_serve_and_rollout_refuse_a_changed_template_when_strict(tmp_path: Path) -> None:
    directory = drifted(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Hi"}\n', "utf-8")
    common = ("--checkpoint", directory, "--tito-model", "qwen3", "--engine", "http://127.0.0.1:9", "--strict-template")
    rollout = ("rollout", "--prompts", prompts, "--agent", "calculator", "--output", tmp_path / "out", *common)
    for done in (run("serve", "--port", "0", *common), run(*rollout)):
        assert (done.returncode, done.stdout) == (2, "")
        head = f"--strict-template: the chat template of {directory} is not the one that family qwen3@qwen3 follows"
        assert head in done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "out" / "samples.jsonl").exists()


def test_serve_warns_of_a_changed_template_once(tmp_path: Path) -> None:
    flags = (
        "--checkpoint",
        str(drifted(tmp_path)),
        "--tito-model",
        "qwen3",
        "--engine",
        "http://127.0.0.1:9",
        "--port",
        "0",
    )
    command = [sys.executable, "-m", "miles_core", "serve", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        block = [process.stdout.readline() for _ in range(9)]
        process.terminate()
        _, errors = process.communicate(timeout=30)
    assert block[-1].startswith("  url")
    assert errors.count("is not the one that family qwen3@qwen3 follows") == 1
    assert "# Functions" in errors


# -- wrong use ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ((), "give --template FILE, or --checkpoint DIR"),
        (("--tito-model", "qwen3"), "--tito-model qwen3 needs --checkpoint DIR"),
        (("--template", "absent.jinja"), "--template absent.jinja: "),
        (("--checkpoint", "./absent"), "there is no such directory"),
        (("--thinking", "maybe"), "'maybe' is not one of"),
        (("--template", "t", "--apply-chat-template-kwargs", "[" * 9999), "not JSON: maximum recursion depth"),
    ],
)
def test_wrong_use(flags: tuple[str, ...], text: str) -> None:
    done = verify(*flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_wrong_use_with_a_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    broken = tmp_path / "t.jinja"
    broken.write_text("{% for %}", "utf-8")
    for flags, text in (
        (("--tito-model", "qwen9"), "did you mean qwen3?"),
        (("--tito-model", "qwen3", "--apply-chat-template-kwargs", '{"clear_thinking": true}'), "is in conflict with"),
        (("--template", broken), "does not compile"),
    ):
        done = verify("--checkpoint", checkpoint, *flags)
        assert done.returncode in (1, 2)
        assert text in done.stderr
        assert "Traceback" not in done.stderr
