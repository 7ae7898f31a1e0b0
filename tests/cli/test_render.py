"""`miles-plugins render`, run as a command over the golden rows."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.chat_tokenizer import DATA, write_checkpoint

Row = dict[str, Any]


def render(checkpoint: Path, lines: list[str], *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "miles_core", "render", "--checkpoint", str(checkpoint), *flags]
    return subprocess.run(
        command, input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    with gzip.open(DATA / "golden_qwen3.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


KEYS = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt")


def test_every_golden_row_line_for_line(checkpoint: Path, rows: list[Row]) -> None:
    done = render(checkpoint, [json.dumps({k: row[k] for k in KEYS}) for row in rows], "--tito-model", "qwen3")
    assert (done.returncode, done.stderr) == (0, "")
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [a["text"] for a in answers] == [row["rendered"] for row in rows]
    assert all(a["ids"] == row["ids"] for a, row in zip(answers, rows, strict=True) if "ids" in row)
    assert all(len(a["ids"]) == row["n_ids"] for a, row in zip(answers, rows, strict=True) if "n_ids" in row)


def test_every_junction_joins(checkpoint: Path, rows: list[Row]) -> None:
    whole = render(checkpoint, [json.dumps({k: row[k] for k in KEYS}) for row in rows], "--tito-model", "qwen3")
    ids = [json.loads(line)["ids"] for line in whole.stdout.splitlines()]
    lines, expected = [], []
    for row, row_ids in zip(rows, ids, strict=True):
        for junction in row.get("junctions", []):
            merge = junction["merge"][0]
            messages = row["messages"][: junction["k"] + junction["appended"]]
            stored = row_ids[: merge["prefix_len"]]
            lines.append(
                json.dumps(
                    {**{k: row[k] for k in KEYS}, "messages": messages, "k": junction["k"], "checkpoint_ids": stored}
                )
            )
            expected.append((junction, merge, stored))
    done = render(checkpoint, lines, "--tito-model", "qwen3")
    assert done.returncode == 0
    for line, (junction, merge, stored) in zip(done.stdout.splitlines(), expected, strict=True):
        answer = json.loads(line)
        assert answer["suffix_text"] == junction["incremental_text"]
        assert answer["suffix_ids"] == junction["incremental_ids"]
        assert len(answer["ids"]) == merge["merged_len"]
        assert answer["ids"] == stored[: answer["kept"]] + answer["bridge_ids"] + answer["suffix_ids"]


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
    ],
)
def test_a_bad_line_is_an_error_line_and_the_rest_goes_on(checkpoint: Path, line: str, kind: str, text: str) -> None:
    good = '{"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": false}'
    done = render(checkpoint, [line, good], "--tito-model", "qwen3")
    assert done.returncode == 0
    bad, fine = map(json.loads, done.stdout.splitlines())
    assert bad["error"]["type"] == kind
    assert text in bad["error"]["message"]
    assert fine["text"] == "<|im_start|>user\nHi<|im_end|>\n"


def test_an_unknown_family_is_a_usage_error(checkpoint: Path) -> None:
    done = render(checkpoint, [], "--tito-model", "qwen33")
    assert done.returncode == 2
    assert "did you mean qwen3?" in done.stderr


def test_a_template_is_refused_for_a_family_that_brings_its_own(checkpoint: Path, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages }}")
    done = render(checkpoint, [], "--tito-model", "qwen3", "--chat-template-path", str(template))
    assert done.returncode == 2
    assert "is only for --tito-model default" in done.stderr
