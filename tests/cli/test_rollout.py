"""`miles-plugins rollout` against a scripted session server, with the real agent and generator."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner, Result

from helpers import fake_generate
from helpers.fake_generate import FakeGenerate, reply
from helpers.fake_sessions import FakeSessions, serving_in_thread, solve
from miles_core.cli import main

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/schemas/sample.schema.json").read_text())

TINY = ["--tito-model", "qwen3", "--model", str(Path(__file__).parents[2] / "examples/tiny/model")]

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
    def interrupt(fake: Any) -> None:
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
        (["--apply-chat-template"], 2, "--apply-chat-template with --generate agentic: an agent works with messages"),
        (["--apply-chat-template", "--generate", "single_turn"], 2, "use --engine instead"),
    ],
)
def test_wrong_usage_is_named(served: Served, more: list[str], code: int, text: str) -> None:
    result = served.run(*more)
    assert (result.exit_code, text in result.stderr) == (code, True), result.stderr
    assert not served.output.exists()


def test_what_has_to_change_is_not_to_be_repeated(served: Served) -> None:
    result = served.run("--generate", "single_turn")
    assert result.exit_code == 2
    assert "needs a tokenizer: give --checkpoint" in result.stderr
    assert "stopped: 0 finished samples are kept\n" in result.stderr
    assert "the same command" not in result.stderr


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


@pytest.mark.parametrize("words", [["--generate", "my_flags.generate"], ["--generate=my_flags.generate"]])
@pytest.mark.parametrize("help_first", [True, False])
def test_help_shows_the_flags_of_the_generate_function(
    words: list[str], help_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_flags.py").write_text(
        GENERATOR.replace("default=3", "default=3, metavar='N', help='Tokens of a sample.'")
    )
    monkeypatch.syspath_prepend(tmp_path)
    result = CliRunner().invoke(main, ["rollout", *(["--help", *words] if help_first else [*words, "--help"])])
    assert result.exit_code == 0
    assert "Flags of generator my_flags.generate" in result.stdout
    assert "--how-long N" in result.stdout
    assert "Tokens of a sample.  [default: 3]" in result.stdout


def test_help_says_why_flags_cannot_be_shown() -> None:
    result = CliRunner().invoke(main, ["rollout", "--generate", "agentik", "--help"])
    assert result.exit_code == 0
    assert "did you mean agentic?" in result.stdout


def test_a_flag_is_not_taken_by_its_beginning(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    (served.folder / "my_abbreviated.py").write_text(GENERATOR)
    monkeypatch.syspath_prepend(served.folder)
    result = served.run("--generate", "my_abbreviated.generate", "--how-lon", "5")
    assert (result.exit_code, "--how-long" in result.stderr) == (2, True)


def test_the_react_agent_with_tools_by_path(served: Served) -> None:
    result = served.run("--react-tools", "miles_agents.calculator.calculate", "--react-max-turns", "3", agent="react")
    assert result.exit_code == 0, result.output
    assert {sample["metadata"]["turns"] for sample in served.samples()} == {2}
    sent = [request for session in served.fake.sessions.values() for request in session.requests]
    assert {tool["function"]["name"] for request in sent for tool in request["tools"]} == {"calculate"}


def test_a_wrong_flag_of_an_agent_is_named_before_anything_starts(served: Served) -> None:
    result = served.run("--react-tools", "no_such.tool", agent="react")
    assert (result.exit_code, "--react-tools no_such.tool" in result.stderr) == (2, True)
    assert not served.output.exists()


def test_the_command_agent(served: Served) -> None:
    program = (
        "import json, os, urllib.request\n"
        "kwargs = json.loads(os.environ['MILES_REQUEST_KWARGS'])\n"
        "body = {'model': 'm', 'messages': json.loads(os.environ['MILES_PROMPT']), **kwargs}\n"
        "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        "head = {'Content-Type': 'application/json'}\n"
        "urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head))\n"
        "json.dump({'reward': 0.25}, open(os.environ['MILES_RESULT_FILE'], 'w'))\n"
    )
    words = f"{shlex.quote(sys.executable)} -c {shlex.quote(program)}"
    result = served.run("--command", words, "--max-tokens", "9", agent="command")
    assert result.exit_code == 0, result.output
    assert [sample["reward"] for sample in served.samples()] == [0.25] * 3
    assert {session.requests[0]["max_tokens"] for session in served.fake.sessions.values()} == {9}


def test_an_unknown_agent_is_named(served: Served) -> None:
    result = served.run(agent="calculater")
    assert result.exit_code == 2
    assert "did you mean calculator?" in result.stderr


def test_a_server_that_is_not_there(served: Served, unused_tcp_port: int) -> None:
    result = served.run("--session-server-url", f"http://127.0.0.1:{unused_tcp_port}")
    assert result.exit_code == 1
    assert "no answer" in result.stderr


FORMS = """
import functools
from miles_agents import calculator

def timed(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper

async def agent(base_url, prompt, request_kwargs, metadata, more=None, **kwargs):
    return await calculator.run_agent(base_url, prompt, request_kwargs, metadata)

decorated = timed(agent)
partial = functools.partial(agent, more=1)

def plain(base_url, prompt, request_kwargs, metadata):
    return agent(base_url, prompt, request_kwargs, metadata)

class Agent:
    async def __call__(self, base_url, prompt, request_kwargs, metadata):
        return await agent(base_url, prompt, request_kwargs, metadata)

instance = Agent()

def sync(base_url, prompt, request_kwargs, metadata):
    return {"reward": 1.0}

def generate(input):
    return input.sample
"""


@pytest.fixture
def forms(served: Served, monkeypatch: pytest.MonkeyPatch) -> Served:
    """A module of agents beside the prompts."""
    (served.folder / "my_forms.py").write_text(FORMS)
    monkeypatch.syspath_prepend(served.folder)
    monkeypatch.delitem(sys.modules, "my_forms", raising=False)
    return served


@pytest.mark.parametrize("name", ["decorated", "partial", "plain", "instance", "Agent"])
def test_an_agent_is_whatever_can_be_awaited(forms: Served, name: str) -> None:
    result = forms.run(agent=f"my_forms.{name}")
    assert result.exit_code == 0, result.output
    assert [each["reward"] for each in forms.samples()] == [1.0] * 3


@pytest.mark.parametrize(
    ("more", "name"),
    [([], "sync returned a dict"), (["--generate", "my_forms.generate"], "generate returned a Sample")],
)
def test_what_cannot_be_awaited_ends_the_run_at_once(forms: Served, more: list[str], name: str) -> None:
    result = forms.run(*more, "--concurrency", "1", agent="my_forms.sync")
    assert result.exit_code == 1
    assert f"Error: my_forms.{name}, which cannot be awaited\n  write `async def`" in result.stderr
    summary = forms.summary()
    assert (summary["samples"], summary["failures"], summary["aborted_rollouts"]) == (0, 0, 1)
    assert summary["rollouts_not_begun"] == 2


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ([], "no engine: give --engine local"),
        (["--engine", "local"], "no model family: give --tito-model"),
        (
            ["--engine", "local", "--tito-model", "qwen3"],
            "no checkpoint: give --checkpoint DIR for the tokenizer, or --model DIR",
        ),
        (["--engine", "http://x", "--tito-model", "qwen33", "--checkpoint", "/no"], "did you mean qwen3?"),
        (["--engine", "http://x", "--tito-model", "qwen3", "--checkpoint", "/no"], "/no"),
        (["--tito-model", "qwen3", "--agent", ""], "--generate agentic needs an agent: give --agent NAME"),
        (["--engine", "http://x", "--tito-model", "qwen3", "--model", "nodir"], "--model nodir: there is no such"),
        (["--engine", "http://x", "--tito-model", "auto", "--model", "nodir"], "--model nodir: there is no such"),
        (["--engine", "127.0.0.1:9", *TINY], "--engine 127.0.0.1:9: the URL of an engine begins with http://; did"),
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


def test_a_dead_engine_is_noticed_at_the_start(tmp_path: Path, unused_tcp_port: int) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "x"}')
    url = f"http://127.0.0.1:{unused_tcp_port}"
    command = ["rollout", "--prompts", str(prompts), "--agent", "calculator", "--output", str(tmp_path / "o")]
    result = CliRunner().invoke(main, [*command, *TINY, "--engine", url])
    assert result.exit_code == 1
    assert f"--engine {url}: no healthy engine answers there" in result.stderr
    assert "is it running" in result.stderr


def test_one_dead_engine_of_several_is_a_warning(tmp_path: Path, unused_tcp_port: int) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "x"}')
    engine = FakeGenerate(script=[reply([5, 6])])
    dead = f"http://127.0.0.1:{unused_tcp_port}"
    with fake_generate.serving_in_thread(engine) as url:
        command = ["rollout", "--prompts", str(prompts), "--generate", "single_turn", "--output", str(tmp_path / "o")]
        result = CliRunner().invoke(main, [*command, *TINY, "--engine", dead, "--engine", url])
    assert result.exit_code == 0, result.output
    assert f"--engine {dead}: no healthy engine answers there" in result.stderr
    assert len(engine.requests) == 1


def test_agentic_without_an_agent(tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "x"}')
    result = CliRunner().invoke(main, ["rollout", "--prompts", str(prompts), "--output", str(tmp_path / "o")])
    assert (result.exit_code, "--agent calculator" in result.stderr) == (2, True)


def test_missing_prompts(tmp_path: Path) -> None:
    command = ["rollout", "--prompts", str(tmp_path / "none"), "--agent", "calculator"]
    result = CliRunner().invoke(main, [*command, "--output", str(tmp_path / "o")])
    assert (result.exit_code, "No such file" in result.stderr) == (2, True)


REWARDS = """
def length(args, sample):
    return {"length": len(sample.response), "odd": float(sample.index % 2)}

async def ranked(args, samples):
    assert args.reward_key is None
    return [at / 10 for at in range(len(samples))]

def only_first(args, samples):
    return samples[0].label == "1"
"""


@pytest.fixture
def rewards(served: Served, monkeypatch: pytest.MonkeyPatch) -> Served:
    """A module of reward functions and filters beside the prompts."""
    (served.folder / "my_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(served.folder)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    monkeypatch.delenv("MILES_EXPERIMENTAL_ROLLOUT_REFACTOR", raising=False)
    return served


def test_a_reward_function_replaces_the_agents_reward(rewards: Served) -> None:
    result = rewards.run("--reward-function", "my_rewards.length")
    assert result.exit_code == 0, result.output
    assert [each["reward"]["length"] for each in rewards.samples()] == [4.0] * 3
    result = rewards.run()
    assert (result.exit_code, '"my_rewards.length"' in result.stderr) == (2, True)


def test_rewards_of_a_group(rewards: Served) -> None:
    flags = ("--custom-rm-path", "my_rewards.ranked", "--group-rm", "--n-samples-per-prompt", "3")
    result = rewards.run(*flags)
    assert result.exit_code == 0, result.output
    assert sorted((each["prompt_index"], each["reward"]) for each in rewards.samples()) == [
        (prompt, at / 10) for prompt in range(3) for at in range(3)
    ]


@pytest.mark.parametrize("filter", ["my_rewards.only_first", "rewards_differ"])
def test_a_filter_and_the_continuous_scheduler(rewards: Served, monkeypatch: pytest.MonkeyPatch, filter: str) -> None:
    flags = ["--dynamic-filter", filter, "--samples-per-prompt", "2", "--reward-function", "my_rewards.length"]
    flags += ["--reward-key", "odd", "--keep-groups", "1", "--concurrency", "2", "--groups-at-once", "1"]
    result = rewards.run(*flags)
    assert (result.exit_code, "set MILES_EXPERIMENTAL_ROLLOUT_REFACTOR=1" in result.stderr) == (2, True)
    assert not rewards.output.exists()
    monkeypatch.setenv("MILES_EXPERIMENTAL_ROLLOUT_REFACTOR", "1")
    result = rewards.run(*flags)
    assert result.exit_code == 0, result.output
    assert [each["prompt_index"] for each in rewards.samples()] == [0, 0]
    summary = rewards.summary()
    assert (summary["groups_kept"], summary["samples"], summary["failures"]) == (1, 2, 0)
    assert "nothing to do" in rewards.run(*flags).stderr


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--group-reward"], "--group-reward says how the reward function is called: give --reward-function"),
        (
            ["--group-reward", "--reward-function", "my_rewards.ranked", "--history", "tree"],
            "--group-reward (--group-rm) with tree histories (--history tree, --use-session-server v2) would be",
        ),
        (["--reward-function", "my_rewards.nothing"], "--reward-function my_rewards.nothing"),
        (["--keep-groups", "2"], "--keep-groups 2: only the continuous scheduler does that"),
        (["--input-key", "question"], "has no 'question' (--input-key)"),
    ],
)
def test_wrong_flags_of_groups_are_named(rewards: Served, more: list[str], text: str) -> None:
    result = rewards.run(*more)
    assert (result.exit_code, text in result.stderr) == (2, True), result.stderr
    assert not rewards.output.exists()
