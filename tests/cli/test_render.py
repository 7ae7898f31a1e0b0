"""`miles-plugins render`, run as a command over the golden rows."""

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
from helpers.golden import golden_family, golden_rows, has_ids, served, tokenizer_name
from real_tokenizers import checkpoint

Row = dict[str, Any]


def render(checkpoint: Path, lines: list[str], *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "miles_core", "render", "--checkpoint", str(checkpoint), *flags]
    return subprocess.run(
        command, input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture(scope="module")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


KEYS = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt")

a_family_of_each_kind = pytest.mark.parametrize(
    "name", ["qwen3", "glm47@glm-5.2", "kimi25", "minimax_m27", "deepseekv32"]
)
"""Templates and encoders, with each way of closing a turn; the other families are tested in `tests/tito`."""


def of_row(row: Row, **more: object) -> str:
    return json.dumps({**{key: row[key] for key in KEYS}, **more})


@a_family_of_each_kind
def test_every_golden_row_line_for_line(name: str) -> None:
    rows = golden_rows(name)
    done = render(checkpoint(tokenizer_name(name)), [of_row(row) for row in rows], "--tito-model", name)
    assert (done.returncode, done.stderr) == (0, "")
    for line, row in zip(done.stdout.splitlines(), rows, strict=True):
        answer = json.loads(line)
        if "error" in row:
            assert answer["error"]["type"] == "RenderError"
            continue
        assert answer["text"] == served(row)
        if has_ids(row) and "n_ids" in row:
            assert len(answer["ids"]) == row["n_ids"]
            assert answer["ids"] == row.get("ids", answer["ids"])


@a_family_of_each_kind
def test_every_junction_joins(name: str) -> None:
    family = golden_family(name)
    lines, expected = [], []
    for row in filter(has_ids, golden_rows(name)):
        for junction in row.get("junctions", []):
            if junction.get("incremental_text") is None or not junction["roles_allowed"]:
                continue
            prefix = family.encode(row["rendered"][: junction["prefix_chars"]])
            stored = prefix[: junction["merge"][0]["prefix_len"]]
            messages = row["messages"][: junction["k"] + junction["appended"]]
            lines.append(of_row(row, messages=messages, k=junction["k"], checkpoint_ids=stored))
            expected.append((junction, stored, family.encode(row["rendered"][: junction["prefix_chars"]])))
    assert lines
    done = render(checkpoint(tokenizer_name(name)), lines, "--tito-model", name)
    assert done.returncode == 0
    for line, (junction, stored, prefix) in zip(done.stdout.splitlines(), expected, strict=True):
        answer = json.loads(line)
        assert answer["suffix_text"] == junction["incremental_text"]
        assert answer["suffix_ids"] == junction["incremental_ids"]
        assert answer["ids"] == stored[: answer["kept"]] + answer["bridge_ids"] + answer["suffix_ids"]
        assert answer["ids"] == prefix + answer["suffix_ids"]


@pytest.mark.parametrize(
    ("line", "kind", "text"),
    [
        ("{", "RequestError", "the line is not valid JSON"),
        ("", "RequestError", "the line is not valid JSON"),
        ("[1]", "RequestError", "the line is a JSON list, expected an object with messages"),
        ('{"tools": []}', "RequestError", "the line has no list of messages"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "RenderError", "Qwen3 has no role 'robot'"),
        ('{"messages": [{"content": "x"}]}', "RenderError", "messages[0] has no role"),
        ('{"messages": [{"role": "user", "content": {"a": 1}}]}', "RenderError", "messages[0].content is an object"),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": [1]}', "RenderError", "tools[0] is a number"),
        ('{"messages": [{"role": "user", "content": "\\ud83d"}]}', "RequestError", "valid Unicode"),
        (
            '{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"clear_thinking": true}}',
            "RequestError",
            "chat_template_kwargs.clear_thinking=True is in conflict with family qwen3",
        ),
        ('{"messages": [{"role": "user", "content": "x"}], "k": 2, "checkpoint_ids": [1]}', "RequestError", "k=2"),
        ('{"messages": [], "k": ' + "[" * 1000 + "]" * 1000 + "}", "RequestError", "k="),
        ('{"messages": [], "chat_template_kwargs": ' + "[" * 1000 + "]" * 1000 + "}", "RequestError", "(found "),
    ],
)
def test_a_bad_line_is_an_error_line_and_the_rest_goes_on(
    small_checkpoint: Path, line: str, kind: str, text: str
) -> None:
    good = '{"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": false}'
    done = render(small_checkpoint, [line, good], "--tito-model", "qwen3")
    assert done.returncode == 0
    bad, fine = map(json.loads, done.stdout.splitlines())
    assert bad["error"]["type"] == kind
    assert text in bad["error"]["message"]
    assert fine["text"] == "<|im_start|>user\nHi<|im_end|>\n"


def test_a_role_that_cannot_be_appended_is_an_error_line() -> None:
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    line = {"messages": [*messages, {"role": "system", "content": "s"}], "k": 2, "checkpoint_ids": [1]}
    done = render(checkpoint("minimax"), [json.dumps(line)], "--tito-model", "minimax_m25")
    assert json.loads(done.stdout)["error"] == {
        "type": "RequestError",
        "message": "family minimax_m25 cannot append messages of role system to a conversation; "
        "it can append: tool, user, assistant",
    }


def test_a_message_that_cannot_be_appended_is_named_by_its_place_in_the_conversation(small_checkpoint: Path) -> None:
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": 5}]
    line = json.dumps({"messages": messages, "k": 2, "checkpoint_ids": [1]})
    done = render(small_checkpoint, [line], "--tito-model", "qwen3")
    assert "messages[2].content is a number" in json.loads(done.stdout)["error"]["message"]


def test_long_integers_keep_their_digits(small_checkpoint: Path) -> None:
    number = 123456789012345678901234567890
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"n": number}}}
    parameters = {"properties": {"n": {"maximum": number + 1}}}
    line = {
        "messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "", "tool_calls": [call]}],
        "tools": [{"name": "f", "parameters": parameters}],
    }
    done = render(small_checkpoint, [json.dumps(line)], "--tito-model", "qwen3")
    text = json.loads(done.stdout)["text"]
    assert f'"n": {number}' in text
    assert f'"maximum": {number + 1}' in text


FAULTY = """
import dataclasses

from miles_core.hookspecs import hookimpl
from miles_core.tito import BoundFamily
from miles_tito_families import qwen3


class Faulty(BoundFamily):
    def join(self, checkpoint_ids, suffix_ids):
        if checkpoint_ids == [1]:
            raise KeyError("no such end")
        return ("2", None) if checkpoint_ids == [2] else (1, [object()])


class Unbound(BoundFamily):
    def __init__(self, *args):
        raise LookupError("no rows")


@hookimpl
def tito_family():
    return dataclasses.replace(qwen3.FAMILY, name="acme", bound_class=Faulty)


class Other:
    @hookimpl
    def tito_family(self):
        return dataclasses.replace(qwen3.FAMILY, name="other", bound_class=Unbound)
"""


def test_code_of_a_family_that_raises_is_an_error_line_that_names_it(small_checkpoint: Path, site: Site) -> None:
    distribution(
        site.path, "acme-families", groups={"miles.tito_families": {"acme": "acme_fam", "other": "acme_fam:Other"}}
    )
    module(site.path, "acme_fam", FAULTY)
    own = Path(str(resources.files("miles_tito_families"))).parent
    talk = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    lines = site.path / "lines.jsonl"
    rows = [{"messages": talk, "k": 2, "checkpoint_ids": [number]} for number in (1, 2, 3)]
    lines.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"messages": talk}]), "utf-8")
    flags = ("--checkpoint", str(small_checkpoint), str(lines))
    done = site.run("render", "--tito-model", "acme", *flags, path=[own])
    assert (done.returncode, done.stderr) == (0, "")
    *bad, good = map(json.loads, done.stdout.splitlines())
    assert [row["error"]["type"] for row in bad] == ["PluginContractError"] * 3
    for row, text in zip(bad, ("KeyError: 'no such end'", "TypeError", "TypeError"), strict=True):
        assert "family acme of acme-families 1.0" in row["error"]["message"]
        assert text in row["error"]["message"]
    assert good["text"].startswith("<|im_start|>user\nu")
    unbound = site.run("render", "--tito-model", "other", *flags, path=[own])
    assert unbound.returncode != 0
    assert "family other of acme-families 1.0" in unbound.stderr
    assert "LookupError: no rows" in unbound.stderr
    assert "Traceback" not in unbound.stderr


def test_an_unknown_family_is_a_usage_error(small_checkpoint: Path) -> None:
    done = render(small_checkpoint, [], "--tito-model", "qwen33")
    assert done.returncode == 2
    assert "did you mean qwen3?" in done.stderr


def test_a_template_is_refused_for_a_family_that_brings_its_own(small_checkpoint: Path, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages }}")
    done = render(small_checkpoint, [], "--tito-model", "qwen3", "--chat-template-path", str(template))
    assert done.returncode == 2
    assert "is only for --tito-model default" in done.stderr
