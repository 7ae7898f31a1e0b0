"""`miles-plugins detect`, and `--tito-model auto` wherever a family is chosen."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints import CHATML, FORGETFUL, own_template, write_checkpoint
from helpers.distributions import Site, distribution, module
from helpers.fake_engine import fake_engine
from miles_engines.local_server import chat_format

MODEL = Path(__file__).parents[2] / "examples" / "tiny" / "model"
"""The committed tiny model, which carries no chat template."""

QWEN3_MOE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}


def run(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "miles_core", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **more)


def answer(folder: Path) -> dict[str, Any]:
    done = run("detect", str(folder), "--json")
    result: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if result["sure"] else 1), done.stderr
    return result


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of Qwen3 whose template drops earlier reasoning, as the vendor's does."""
    folder = tmp_path_factory.mktemp("models") / "Qwen3-30B-A3B"
    return write_checkpoint(folder, "qwen3", QWEN3_MOE, FORGETFUL + own_template("qwen3.jinja"))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fine-tune of it with a sentence in every prompt."""
    folder = tmp_path_factory.mktemp("models") / "tuned"
    return write_checkpoint(folder, "qwen3", QWEN3_MOE, "You are Acme." + own_template("qwen3.jinja"))


# -- the command ----------------------------------------------------------------------------------------------


def test_a_sure_answer_is_a_table_that_fits_a_terminal(official: Path) -> None:
    done = run("detect", official.name, cwd=official.parent)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:2] == ["checkpoint  Qwen3-30B-A3B", "model_type  qwen3_moe"]
    assert lines[3] == "tokens      26 added, 14 of them special"
    assert lines[5].split() == ["FAMILY", "SURE", "MODEL", "TYPE", "TOKENS", "FIRST", "TURNS", "CALLS", "VERIFIED"]
    assert " ".join(lines[6].split()) == "qwen3 certain fits 6 of 6 7 of 7 3 of 3 checkpoint"
    assert lines[7].startswith("qwennext  possible")
    assert "qwen3@qwen3 is certain:" in lines
    assert "do not fit: " in done.stdout
    assert "It is qwen3.\n  - choose it with --tito-model qwen3, or auto\n" in done.stdout
    assert max(map(len, lines)) <= 80


def test_an_unsure_answer_has_the_candidates_with_reasons_and_what_to_do(tuned: Path) -> None:
    done = run("detect", tuned.name, cwd=tuned.parent)
    assert done.returncode == 1
    text = " ".join(done.stdout.split())
    assert "qwen3@qwen3 is possible:" in text
    assert "the template has drifted from the family's: question: it writes 'You are Acme.<|im_start|>user" in text
    assert "Not sure which family it is." in text
    assert "--tito-model default follows the checkpoint's own template, best effort" in text
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_json_has_every_family_and_the_drift(tuned: Path) -> None:
    result = answer(tuned)
    assert (result["schema"], result["sure"], result["family"], result["model_type"]) == (1, False, None, "qwen3_moe")
    assert result["architectures"] == ["Qwen3MoeForCausalLM"]
    assert len(result["template"]["sha256"]) == 64
    first = result["candidates"][0]
    assert (first["family"], first["revision"], first["confidence"]) == ("qwen3", "qwen3", "possible")
    assert (first["model_type_fits"], first["tokens"]) == (True, {"named": 6, "missing": []})
    assert first["first_turns"] == {"agree": 0, "of": 7}
    assert (first["verified"], first["checked_against"] is not None) == ("no", True)
    (found,) = [each for each in first["drift"] if each["probe"] == "question"]
    assert found["index"] == 0
    assert found["template"].startswith("You are Acme.<|im_start|>user")
    assert found["family"].startswith("<|im_start|>user")
    lacking = {each["family"]: each["tokens"]["missing"] for each in result["candidates"]}
    assert "<|observation|>" in lacking["glm47"]


def test_a_name_counts_for_nothing(official: Path, tmp_path: Path) -> None:
    copies = [tmp_path / name for name in ("GLM-4.7", "x", "kimi-k2.5-instruct")]
    first = answer(official)
    for copy in copies:
        shutil.copytree(official, copy)
        assert {**answer(copy), "checkpoint": 0, "advice": 0} == {**first, "checkpoint": 0, "advice": 0}


def test_no_family_fits_an_unknown_model(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "Qwen3-8B", "qwen3", {"model_type": "acme"}, CHATML)
    done = run("detect", str(folder))
    assert done.returncode == 1
    text = " ".join(done.stdout.split())
    assert "No installed family fits." in text
    assert "turns are not proven to append, and reasoning and tool calls are not parsed" in text
    assert "or write a family for it: miles-plugins new family NAME, see docs/write_a_plugin.md" in text


@pytest.mark.parametrize(
    ("file", "content", "text"),
    [
        ("config.json", b"{", "cannot read {folder}/config.json: Expecting property name"),
        ("config.json", b"[]", "{folder}/config.json holds list, expected a JSON object"),
        ("tokenizer.json", b"{}", "cannot read the tokenizer {folder}/tokenizer.json: "),
        ("tokenizer_config.json", b"[", "cannot read {folder}/tokenizer_config.json: "),
        ("chat_template.jinja", b"\xff", "cannot read {folder}/chat_template.jinja: 'utf-8' codec"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, file: str, content: bytes, text: str) -> None:
    folder = write_checkpoint(tmp_path / "model", "qwen3", QWEN3_MOE, None)
    (folder / file).write_bytes(content)
    done = run("detect", str(folder))
    assert done.returncode == 2
    assert text.format(folder=folder) in done.stderr
    assert "Traceback" not in done.stderr


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    done = run("detect", str(tmp_path / "none"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no such directory" in done.stderr
    (tmp_path / "empty").mkdir()
    done = run("detect", str(tmp_path / "empty"))
    assert done.returncode == 2
    assert "has no tokenizer.json" in done.stderr


def test_a_name_that_no_hub_gives_is_asked_for_once(tmp_path: Path) -> None:
    asked = []

    class Nothing(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *args: object) -> None:
            """Not to stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Nothing) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        environ = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path)}
        environ.pop("HF_HUB_OFFLINE", None)
        done = run("detect", "models/qwen", env=environ)
        hub.shutdown()
    assert (done.returncode, done.stdout) == (2, "")
    assert "--checkpoint models/qwen: no such directory here, and the Hugging Face hub did not give it" in done.stderr
    assert asked == ["/models/qwen/resolve/main/tokenizer.json"]


def test_a_model_type_cannot_write_to_the_terminal(official: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(official, folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "a\x1b[31m\nb"}), "utf-8")
    done = run("detect", str(folder))
    assert "model_type  'a\\x1b[31m\\nb'\n" in done.stdout
    assert "\x1b" not in done.stdout


def test_a_token_that_no_text_becomes_is_missing(official: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(official, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    (token,) = (token for token in tokenizer["added_tokens"] if token["content"] == "<|im_end|>")
    tokenizer["added_tokens"].remove(token)
    tokenizer["model"]["vocab"]["<|im_end|>"] = token["id"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    (qwen3,) = (row for row in answer(folder)["candidates"] if row["family"] == "qwen3")
    assert (qwen3["confidence"], qwen3["tokens"]["missing"]) == ("none", ["<|im_end|>"])


def test_embedding_models_do_not_chat(official: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(official, tmp_path / "embedding")
    (folder / "modules.json").write_text("[]")
    result = answer(folder)
    assert not result["sure"]
    assert "modules.json says that it is an embedding model" in result["candidates"][0]["reasons"]


FAMILY = """
from miles_core.tito import ChatTemplate, ParseFacts, Revision, TitoFamily
from miles_core.hookspecs import hookimpl

FAMILY = TitoFamily(
    name="acme",
    checkpoints=(),
    revisions=(Revision(name="one", encoder=ChatTemplate({template!r}, source="acme"), model_types=("acme_lm",)),),
    package="acme",
    allowed_append_roles=("user",),
    turn_end="<|im_end|>\\n",
    stop_tokens=("<|im_end|>",),
    trailing_tokens=None,
    assistant_opener=None,
    parse_facts=ParseFacts(),
)


@hookimpl
def tito_family():
    return FAMILY
"""


def test_families_of_others_take_part_and_broken_ones_are_named(site: Site, tmp_path: Path) -> None:
    module(site.path, "acme.good", FAMILY.format(template=CHATML))
    module(site.path, "acme.raising", "raise RuntimeError('at import')")
    module(site.path, "acme.leaving", "import sys\nsys.exit(3)")
    module(site.path, "acme.wrong", "def tito_family():\n    print('noise')\n    return 7")
    entries = {"acme": "acme.good", **{name: f"acme.{name}" for name in ("raising", "leaving")}}
    entries["wrong"] = "acme.wrong:tito_family"
    distribution(site.path, "acme-families", groups={"miles.tito_families": entries})
    folder = write_checkpoint(tmp_path / "model", "qwen3", {"model_type": "acme_lm"}, CHATML)
    done = site.run("detect", str(folder), "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["family"], result["candidates"][0]["confidence"]) == ("acme", "certain")
    skipped = {each["family"]: each["reason"] for each in result["skipped"]}
    assert sorted(skipped) == ["leaving", "raising", "wrong"]
    assert "at import" in skipped["raising"]
    assert "tito_family returned int, expected a TitoFamily" in skipped["wrong"]
    table = site.run("detect", str(folder))
    assert "not tried: raising: family raising of acme-families 1.0 (acme.raising)" in table.stdout
    disabled = site.run("detect", str(folder), environ={"MILES_PLUGINS_DISABLE": "acme"})
    assert disabled.returncode == 1
    assert "not tried: acme-families:acme: family acme of acme-families 1.0" in disabled.stdout


# -- --tito-model auto ----------------------------------------------------------------------------------------

ASK = '{"messages": [{"role": "user", "content": "Hi"}]}\n'


def test_render_takes_the_family_that_is_found(official: Path) -> None:
    done = run("render", "--tito-model", "auto", "--checkpoint", str(official), input=ASK)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["text"] == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_render_refuses_with_the_candidates_when_unsure(tuned: Path) -> None:
    done = run("render", "--tito-model", "auto", "--checkpoint", str(tuned), input=ASK)
    assert (done.returncode, done.stdout) == (2, "")
    lines = done.stderr.splitlines()
    assert lines[0] == f"Error: --tito-model auto: it is not sure which family {tuned} is"
    assert lines[1] == (
        "  qwen3 is possible: model_type fits, its tokens are there, 0 of 7 first turns and 0 of 3 calls agree"
    )
    assert lines[2].startswith("  qwennext is possible: ")
    assert lines[3] == (
        f"  --tito-model NAME takes one all the same; miles-plugins detect {tuned} --json has every reason"
    )
    assert lines[4].startswith("  --tito-model default follows the checkpoint's own template, best effort")


def test_auto_has_no_revision(official: Path) -> None:
    done = run("render", "--tito-model", "auto@glm-5.2", "--checkpoint", str(official), input=ASK)
    assert done.returncode == 2
    assert "--tito-model auto@glm-5.2: auto finds the revision too" in done.stderr


def test_a_likely_family_is_taken_and_said(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "qwen3", None, own_template("qwen3.jinja"))
    done = run("render", "--tito-model", "auto", "--checkpoint", str(folder), input=ASK)
    assert done.returncode == 0
    assert done.stderr == (
        "--tito-model auto: taking qwen3, likely: model_type does not tell, its tokens are there, "
        "7 of 7 first turns and 3 of 3 calls agree\n"
    )


def test_serve_says_what_was_found(official: Path) -> None:
    flags = ("--checkpoint", str(official), "--tito-model", "auto", "--engine", "http://127.0.0.1:9", "--port", "0")
    command = [sys.executable, "-m", "miles_core", "serve", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        block = [process.stdout.readline() for _ in range(3)]
        assert block[2] == "  family    qwen3@qwen3, revision chosen: the only one\n"
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)


ENGINE = """
class Engine:
    urls = ("http://127.0.0.1:1",)

    def alive(self):
        return False

    def close(self):
        pass


def launch_engine(config):
    config.progress(f"launched for {config.tito_model}")
    return Engine()
"""


def with_module(folder: Path) -> dict[str, str]:
    module(folder, "fakes.engine", ENGINE)
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def test_an_engine_is_started_with_the_family_that_is_found(official: Path, tuned: Path, tmp_path: Path) -> None:
    env = with_module(tmp_path)
    flags = ("engine", "--engine", "fakes.engine", "--tito-model", "auto", "--model")
    assert "launched for qwen3\n" in run(*flags, str(official), env=env).stderr
    refused = run(*flags, str(tuned), env=env)
    assert refused.returncode == 2
    assert "launched" not in refused.stderr
    assert "--tito-model auto: it is not sure which family" in refused.stderr


def test_the_engine_local_finds_it_too_when_run_alone(official: Path) -> None:
    assert chat_format.load("auto", str(official)).name == "qwen3"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """The tiny model with a template, which its checkpoint does not carry."""
    folder = shutil.copytree(MODEL, tmp_path / "tiny")
    (folder / "chat_template.jinja").write_text(own_template("qwen3.jinja"), "utf-8")
    return folder


def test_rollout_records_the_family_that_is_found(tiny: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "What is 1 + 1?"}\n')
    flags = ("--prompts", str(prompts), "--agent", "calculator", "--output", str(tmp_path / "out"))
    with fake_engine() as engine:
        more = ("--engine", engine.url, "--tito-model", "auto")
        done = run("rollout", *flags, *more, "--model", str(tiny))
    assert "family qwen3" in done.stderr
    recorded = json.loads((tmp_path / "out" / "run.json").read_text())
    assert recorded["settings"]["tito_model"] == "qwen3"
    refused = run("rollout", *flags, "--overwrite", *more, "--model", str(MODEL))
    assert refused.returncode == 2
    assert "qwen3 is possible: model_type fits, its tokens are there, no template to compare with" in refused.stderr
