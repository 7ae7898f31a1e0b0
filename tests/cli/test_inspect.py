"""`miles-plugins inspect` on the output of a rollout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from helpers.tiny import write_tokenizer
from miles_core.cli import main
from miles_core.cli.inspect import spans
from miles_core.rollout.data import Prompt
from miles_core.rollout.job import Job, new_sample, to_record
from miles_core.rollout.output import RunDirectory, encode_line

SAMPLED = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+1"}}\n</tool_call><|im_end|>'


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Two samples; the second has two turns, the first calling a tool."""
    tokenizer = write_tokenizer(tmp_path / "checkpoint")
    pieces = [("<|im_start|>user\nHi\x1b[2J", 0), (SAMPLED, 1), ("\nresult 2", 0), ("The answer is 2.", 1)]
    ids = [(tokenizer.encode(text).ids, trained) for text, trained in pieces]
    prompt = Prompt(0, [{"role": "user", "content": "Hi"}], "2", {}, "0" * 16)
    path = tmp_path / "out"
    settings = {"checkpoint": str(tmp_path / "checkpoint"), "tito_model": "qwen3"}
    directory = RunDirectory(path, settings)
    directory.close()
    with (path / "samples.jsonl").open("wb") as file:
        for at in range(2):
            sample = new_sample(Job(prompt, at), 2)
            sample.tokens = [each for tokens, _ in ids for each in tokens]
            sample.loss_mask = [trained for tokens, trained in ids[1:] for _ in tokens]
            sample.rollout_log_probs = [-0.25 * on for on in sample.loss_mask]
            sample.response_length, sample.reward = len(sample.loss_mask), float(at)
            sample.metadata = {"tito_session_mismatch": [], "agent_error": "ValueError: no"}
            file.write(encode_line(to_record(Job(prompt, at), sample, 0, 1)))
    return path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["inspect", *map(str, arguments)])


def test_a_sample_turn_by_turn(output: Path) -> None:
    result = run(output, "1")
    assert result.exit_code == 0, result.output
    text = result.stdout
    assert f"sample 1 of 2 in {output}" in text
    assert "reward    1.0, label 2" in text
    assert text.index("prompt: tokens 0 to") < text.index("turn 1, sampled") < text.index("appended: tokens")
    assert text.index("appended: tokens") < text.index("turn 2, sampled")
    assert 'tool call calculator {"expression": "1+1"}' in text
    assert "log-prob mean -0.250, lowest -0.250" in text
    assert "failed: ValueError: no" in text
    assert "\x1b" not in text, "a sample must not drive the terminal"
    assert "Hi\\x1b[2J" in text


def test_without_a_number_the_first(output: Path) -> None:
    assert "sample 0 of 2" in run(output).stdout


def test_colours_say_what_is_trained(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = run(output).stdout
    assert "\x1b[1;32mThe answer is 2." in text
    assert "\x1b[2m<|im_start|>user" in text


def test_tokens_are_listed(output: Path) -> None:
    text = run(output, "--tokens").stdout
    assert "log-prob" in text
    assert "'<tool_call>'" in text
    assert "-0.2500" in text


def test_json_is_the_line(output: Path) -> None:
    line = json.loads((output / "samples.jsonl").read_text().splitlines()[0])
    assert json.loads(run(output, "--json").stdout) == line


def test_without_a_tokenizer_ids_are_shown(output: Path) -> None:
    result = run(output, "--checkpoint", output / "gone")
    assert result.exit_code == 0
    assert "ids only" in result.stderr
    assert "turn 1, sampled" in result.stdout


def test_a_number_too_high_says_what_there_is(output: Path) -> None:
    result = run(output, "7")
    assert (result.exit_code, "it has samples 0 to 1" in result.stderr) == (2, True)


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert (result.exit_code, "no output of a rollout" in result.stderr) == (2, True)


def test_spans_start_with_the_prompt() -> None:
    record = {"tokens": [1, 2, 3, 4], "loss_mask": [1, 0], "rollout_log_probs": [-1.0, 0.0]}
    assert [(span.trained, span.start, list(span.ids)) for span in spans(record)] == [
        (False, 0, [1, 2]),
        (True, 2, [3]),
        (False, 3, [4]),
    ]
