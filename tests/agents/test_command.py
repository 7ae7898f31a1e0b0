"""Any program as agent: what it is given, what comes back, and that nothing of it stays behind."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import pytest

from helpers.fake_sessions import FakeSession, FakeSessions, serving
from helpers.programs import python, runs, wait_for_pids
from miles_agents import command
from miles_agents.command import CommandAgent
from miles_core.errors import ConfigError
from miles_core.plugins import Registry

PROMPT = [{"role": "user", "content": "What is 2 + 3?"}]

SOLVER = """
import json, os, urllib.request

def chat(messages):
    body = {"model": "m", "messages": messages, **json.load(open(os.environ["MILES_REQUEST_KWARGS_FILE"]))}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

prompt = json.load(open(os.environ["MILES_PROMPT_FILE"]))
assert json.loads(os.environ["MILES_PROMPT"]) == prompt
assert json.loads(os.environ["MILES_METADATA"]) == json.load(open(os.environ["MILES_METADATA_FILE"]))
chat(prompt)
json.dump({"reward": 0.5, "label": json.loads(os.environ["MILES_METADATA"])["label"]},
          open(os.environ["MILES_RESULT_FILE"], "w"))
"""


def agent_of(words: str, timeout: float | None = None) -> CommandAgent:
    return CommandAgent(shlex.split(words), timeout=timeout)


async def run(agent: CommandAgent, metadata: dict[str, Any] | None = None, prompt: Any = PROMPT) -> dict[str, Any]:
    return await agent.run_agent("http://127.0.0.1:9/sessions/s", prompt, {"temperature": 0.5}, metadata or {})


async def test_a_program_works_in_its_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILES_API_KEY", "the server's")
    fake = FakeSessions()
    fake.sessions["s"] = FakeSession()
    async with serving(fake) as url:
        agent = agent_of(python(tmp_path, SOLVER + "assert 'MILES_API_KEY' not in os.environ\n"))
        result = await agent.run_agent(f"{url}/sessions/s", PROMPT, {"temperature": 0.5}, {"label": "5"})
    assert result == {"reward": 0.5, "label": "5"}
    sent = fake.sessions["s"].requests[0]
    assert (sent["messages"], sent["temperature"]) == (PROMPT, 0.5)


@pytest.mark.parametrize(
    ("source", "result"),
    [
        ("", {}),
        ("import os; open(os.environ['MILES_RESULT_FILE'], 'w').write('')", {}),
        (
            "import os; open(os.environ['MILES_RESULT_FILE'], 'w').write('[' * 100000)",
            {
                "agent_error": "the result in MILES_RESULT_FILE is no JSON object: maximum recursion depth exceeded "
                "while decoding a JSON array from a unicode string"
            },
        ),
        (
            "import os, sys; open(os.environ['MILES_RESULT_FILE'], 'w').write('[1]')",
            {"agent_error": "the result in MILES_RESULT_FILE is no JSON object: it is a list"},
        ),
        (
            "import os, sys; open(os.environ['MILES_RESULT_FILE'], 'w').write('{\"reward\": 1}'); sys.exit('broken')",
            {"reward": 1, "agent_error": "PROGRAM exited with 1: broken"},
        ),
        ("import os; os.kill(os.getpid(), 9)", {"agent_error": "PROGRAM was killed by signal 9"}),
    ],
)
async def test_what_comes_back(tmp_path: Path, source: str, result: dict[str, Any]) -> None:
    agent = agent_of(python(tmp_path, source))
    found = json.loads(json.dumps(await run(agent)).replace(agent.command[0], "PROGRAM"))
    assert found == result


async def test_a_long_prompt_is_in_the_file_only(tmp_path: Path) -> None:
    source = (
        "import json, os\n"
        "assert 'MILES_PROMPT' not in os.environ and 'MILES_METADATA' in os.environ\n"
        "size = len(json.load(open(os.environ['MILES_PROMPT_FILE']))[0]['content'])\n"
        "json.dump({'size': size}, open(os.environ['MILES_RESULT_FILE'], 'w'))\n"
    )
    prompt = [{"role": "user", "content": "ü" * 200_000}]
    assert await run(agent_of(python(tmp_path, source)), prompt=prompt) == {"size": 200_000}


CHILDREN = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
open({path!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
os.rename({path!r}, {path!r} + ".done")
{then}
"""
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


async def pids(path: Path) -> list[int]:
    """The program's and its child's, once both run."""
    return await asyncio.to_thread(wait_for_pids, Path(f"{path}.done"))


async def gone(both: list[int]) -> bool:
    """Whether they end; a killed process takes a moment."""
    for _ in range(200):
        if not any(map(runs, both)):
            return True
        await asyncio.sleep(0.01)
    return False


async def test_the_time_limit_kills_the_whole_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "GRACE", 0.1)
    path = tmp_path / "pids"
    agent = agent_of(python(tmp_path, CHILDREN.format(path=str(path), then=DEAF)), timeout=2)
    result = await run(agent)
    assert result == {"agent_error": f"{agent.command[0]} was not finished within 2 s (--command-timeout)"}
    assert await gone(await pids(path))


async def test_what_a_program_left_behind_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "pids"
    assert await run(agent_of(python(tmp_path, CHILDREN.format(path=str(path), then="")))) == {}
    assert await gone(await pids(path))


@pytest.mark.parametrize("how", ["cancel", "abort"])
async def test_abort_and_cancel_kill_the_whole_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(command, "GRACE", 0.1)
    path = tmp_path / "pids"
    agent = agent_of(python(tmp_path, CHILDREN.format(path=str(path), then=DEAF)))
    task = asyncio.create_task(run(agent))
    both = await pids(path)
    assert all(map(runs, both))
    if how == "cancel":
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        await agent.abort(None)
        assert (await task)["agent_error"] == f"{agent.command[0]} was killed by signal 9"
    assert await gone(both)


async def test_the_files_are_gone_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    result_file = "open(os.environ['MILES_RESULT_FILE'], 'w')"
    source = f"import json, os; json.dump({{'at': os.environ['MILES_PROMPT_FILE']}}, {result_file})"
    result = await run(agent_of(python(tmp_path, source)))
    assert result["at"].startswith(str(tmp_path / "t"))
    assert os.listdir(tmp_path / "t") == []


def configured(*words: str) -> CommandAgent:
    parser = ArgumentParser()
    agent: Any = Registry.discover().load("agent", "command")
    agent.call("add_arguments", parser)
    agent.call("configure_agent", parser.parse_args(words))
    made = CommandAgent()
    made.configure_agent(parser.parse_args(words))
    return made


def test_flags(tmp_path: Path) -> None:
    agent = configured("--command", "sh -c 'echo a b'", "--command-timeout", "5")
    assert (agent.command, agent.timeout) == (["sh", "-c", "echo a b"], 5.0)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "the agent command needs a program: give --command 'PROGRAM ARGUMENTS'"),
        (["--command", "no-such-program x"], "there is no program 'no-such-program', or it may not be run"),
        (["--command", "sh 'x"], "--command sh 'x: No closing quotation"),
        (["--command", "sh", "--command-timeout", "0"], "--command-timeout 0: expected more than 0"),
    ],
)
def test_wrong_flags_are_named(words: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        configured(*words)
    assert text in raised.value.message


async def test_an_agent_without_a_program_says_so() -> None:
    with pytest.raises(ConfigError, match="give --command"):
        await run(CommandAgent())


def test_a_namespace_of_another_trainer_may_lack_the_limit() -> None:
    agent = CommandAgent()
    agent.configure_agent(Namespace(command="sh", command_timeout=None))
    assert agent.timeout is None
