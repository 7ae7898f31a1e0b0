"""`miles-plugins rollout` against a scripted session server, with the real agent and generator."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner, Result

from helpers.fake_sessions import FakeSessions, serving_in_thread, solve
from miles_core.cli import main

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/schemas/sample.schema.json").read_text())

LINES = [{"prompt": f"What is {at} + 1?", "label": str(at + 1)} for at in range(3)]


class Served:
    """A session server, a prompts file, and the command run against them."""

    def __init__(self, fake: FakeSessions, url: str, folder: Path) -> None:
        self.fake, self.url, self.folder = fake, url, folder
        self.prompts, self.output = folder / "prompts.jsonl", folder / "out"
        self.prompts.write_text("".join(json.dumps(line) + "\n" for line in LINES))

    def run(self, *more: str, agent: str = "calculator") -> Result:
        command = ["rollout", "--prompts", str(self.prompts), "--agent", agent, "--output", str(self.output)]
        return CliRunner().invoke(main, [*command, "--session-server-url", self.url, *more])

    def samples(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.output / "samples.jsonl").read_text().splitlines()]

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.output / "summary.json").read_text())
        return found


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    fake = FakeSessions()
    with serving_in_thread(fake) as url:
        yield Served(fake, url, tmp_path)


def test_a_whole_run(served: Served) -> None:
    served.fake.with_experts = True
    result = served.run("--samples-per-prompt", "2", "--max-tokens", "50", "--max-seq-len", "99", "--seed", "1")
    assert result.exit_code == 0, result.output
    assert "samples       6" in result.stdout
    assert "3 × 2 = 6 rollouts" in result.stderr
    samples = served.samples()
    assert sorted((each["prompt_index"], each["sample_index"]) for each in samples) == [
        (prompt, at) for prompt in range(3) for at in range(2)
    ]
    for each in samples:
        jsonschema.validate(each, SCHEMA)
        assert (each["reward"], each["status"], each["label"]) == (1.0, "completed", str(each["prompt_index"] + 1))
        assert each["rollout_routed_experts"]["shape"] == [len(each["tokens"]) - 1, 2, 2]
    summary = served.summary()
    assert (summary["samples"], summary["failures"], summary["reward"]["mean"]) == (6, 0, 1.0)
    requests = [request for session in served.fake.sessions.values() for request in session.requests]
    assert {(each["max_tokens"], each["top_p"], each["top_k"]) for each in requests} == {(50, 1.0, -1)}
    assert len({each["seed"] for each in requests}) == 6
    assert served.fake.deleted.__len__() == 6


def test_json_is_the_summary(served: Served) -> None:
    result = served.run("--json", "--limit", "1")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == served.summary()


def test_a_second_run_has_nothing_to_do(served: Served) -> None:
    served.run()
    turns = served.fake.turns
    result = served.run()
    assert result.exit_code == 0
    assert "nothing to do" in result.stderr
    assert served.fake.turns == turns
    assert len(served.samples()) == 3


def test_limit_grows_and_samples_are_not_repeated(served: Served) -> None:
    served.run("--limit", "1")
    result = served.run()
    assert "1 done before" in result.stderr
    assert "3 (1 from before)" in result.stdout
    assert len(served.fake.sessions) == 3


def test_other_settings_are_refused_by_name(served: Served) -> None:
    served.run()
    result = served.run("--temperature", "0.5")
    assert result.exit_code == 2
    assert '"temperature": 1.0' in result.stderr
    assert "--overwrite" in result.stderr
    assert served.run("--temperature", "0.5", "--overwrite").exit_code == 0
    assert len(served.samples()) == 3


def test_failing_rollouts_are_survived_and_tried_again(served: Served) -> None:
    served.fake.script = lambda request: 400 if "What is 1" in request["messages"][0]["content"] else solve(request)
    result = served.run()
    assert result.exit_code == 0
    assert "1 rollout failed" in result.stderr
    assert "scripted 400" in (served.output / "failures.jsonl").read_text()
    assert served.summary()["failures"] == 1
    served.fake.script = solve
    assert served.run().exit_code == 0
    assert (served.summary()["samples"], served.summary()["failures"]) == (3, 0)


def test_a_run_without_any_sample_is_a_failure(served: Served) -> None:
    served.fake.samples_status = 500
    result = served.run()
    assert result.exit_code == 1
    assert "3 rollouts failed" in result.stderr


def test_ctrl_c_keeps_finished_samples_and_resumes(served: Served) -> None:
    def interrupt(fake: FakeSessions) -> None:
        if fake.turns == 4:  # the third prompt's first turn
            fake.script = lambda request: 503
            os.kill(os.getpid(), signal.SIGINT)

    served.fake.on_turn = interrupt
    result = served.run("--concurrency", "1")
    assert result.exit_code == 130
    assert "interrupted: 2 finished samples are kept; the same command resumes the run" in result.stderr
    assert (len(served.samples()), served.summary()["interrupted"]) == (2, True)
    assert served.fake.deleted == list(served.fake.sessions)
    served.fake.on_turn, served.fake.script = lambda fake: None, solve
    assert served.run("--concurrency", "1").exit_code == 0
    assert sorted(each["prompt_index"] for each in served.samples()) == [0, 1, 2]


@pytest.mark.parametrize(
    ("more", "code", "text"),
    [
        (["--limit", "0"], 2, "--limit"),
        (["--no-such-flag", "1"], 2, "--no-such-flag"),
        (["--samples-per-promt", "1"], 2, "--samples-per-prompt"),
        (["--generate", "agentik"], 2, "agentic"),
        (["--apply-chat-template-kwargs", "[1]"], 2, "not an object"),
        (["--apply-chat-template-kwargs", "{"], 2, "not JSON"),
        (["--engine", "local"], 2, "leave out --engine"),
    ],
)
def test_wrong_usage_is_named(served: Served, more: list[str], code: int, text: str) -> None:
    result = served.run(*more)
    assert (result.exit_code, text in result.stderr) == (code, True), result.stderr
    assert not served.output.exists()


GENERATOR = """
from miles_core import GenerateFnOutput
from miles_core.types import SampleStatus

def add_arguments(parser):
    parser.add_argument("--how-long", type=int, default=3)

async def generate(args, sample, sampling_params):
    sample.tokens = [1] * args.how_long
    sample.response_length = 1
    sample.loss_mask, sample.rollout_log_probs = [1], [-1.0]
    sample.status = SampleStatus.COMPLETED
    return sample
"""


def test_a_generate_function_of_the_older_form_with_flags(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    (served.folder / "my_generator.py").write_text(GENERATOR)
    monkeypatch.syspath_prepend(served.folder)
    result = served.run("--generate", "my_generator.generate", "--how-long", "5")
    assert result.exit_code == 0, result.output
    assert [len(each["tokens"]) for each in served.samples()] == [5, 5, 5]
    result = served.run("--generate", "my_generator.generate", "--how-long", "6")
    assert (result.exit_code, '"how_long": "5"' in result.stderr) == (2, True)
    assert served.run("--generate", "my_generator.generate", "--how-long", "x").exit_code == 2


def test_an_unknown_agent_is_named(served: Served) -> None:
    result = served.run(agent="calculater")
    assert result.exit_code == 2
    assert "did you mean calculator?" in result.stderr


def test_a_server_that_is_not_there(served: Served, unused_tcp_port: int) -> None:
    result = served.run("--session-server-url", f"http://127.0.0.1:{unused_tcp_port}")
    assert result.exit_code == 1
    assert "no answer" in result.stderr


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ([], "no engine: give --engine local"),
        (["--engine", "local"], "no model family: give --tito-model"),
        (["--engine", "local", "--tito-model", "qwen3"], "no checkpoint: give --model"),
        (["--engine", "http://x", "--tito-model", "qwen33", "--checkpoint", "/no"], "did you mean qwen3?"),
        (["--engine", "http://x", "--tito-model", "qwen3", "--checkpoint", "/no"], "/no"),
        (["--tito-model", "qwen3", "--agent", ""], "no engine"),
    ],
)
def test_what_is_missing_for_an_engine_is_named(tmp_path: Path, more: list[str], text: str) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "x"}')
    command = ["rollout", "--prompts", str(prompts), "--agent", "calculator", "--output", str(tmp_path / "o")]
    result = CliRunner().invoke(main, [*command, *more])
    assert result.exit_code == 2
    assert text in result.stderr
    assert not (tmp_path / "o").exists()


def test_agentic_without_an_agent(tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "x"}')
    result = CliRunner().invoke(main, ["rollout", "--prompts", str(prompts), "--output", str(tmp_path / "o")])
    assert (result.exit_code, "--agent calculator" in result.stderr) == (2, True)


def test_missing_prompts(tmp_path: Path) -> None:
    command = ["rollout", "--prompts", str(tmp_path / "none"), "--agent", "calculator"]
    result = CliRunner().invoke(main, [*command, "--output", str(tmp_path / "o")])
    assert (result.exit_code, "No such file" in result.stderr) == (2, True)
