"""`miles-plugins rollout` whose only engine dies in the middle: nothing is lost, and nothing is spent on a dead one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from helpers.chat_tokenizer import write_checkpoint
from helpers.fake_engine import FakeEngine, Gate, Reply, fake_engine, says
from helpers.worker_processes import until
from miles_core.server.app import ServerThread
from miles_core.server.settings import ServerSettings

AGENT = """
import aiohttp

async def run_agent(base_url, prompt, request_kwargs, metadata):
    body = {"model": "m", "messages": prompt, **request_kwargs}
    async with aiohttp.ClientSession() as http, http.post(f"{base_url}/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
    return {"reward": 1.0}
"""
PROMPTS, CONCURRENCY, ANSWERED = 12, 3, 5


class Run:
    """The command against an engine that answers so many turns, and then holds the others back."""

    def __init__(self, folder: Path, engine: FakeEngine) -> None:
        self.folder, self.engine, self.output = folder, engine, folder / "out"
        self.checkpoint = write_checkpoint(folder / "model")
        self.process: subprocess.Popen[bytes] | None = None
        self.gate = Gate()
        (folder / "one_turn.py").write_text(AGENT)
        rows = [{"prompt": f"task {at}"} for at in range(PROMPTS)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        engine.always = self._answer

    def _answer(self, body: Any) -> Reply:
        return says() if len(self.engine.turns) <= ANSWERED else says(gate=self.gate)

    def serve(self, stack: ExitStack) -> list[str]:
        """Have a session server of its own."""
        settings = ServerSettings(checkpoint=str(self.checkpoint), tito_model="qwen3", engine_urls=(self.engine.url,))
        return ["--session-server-url", stack.enter_context(ServerThread(settings)).url]

    @property
    def direct(self) -> list[str]:
        """The engine by its URL."""
        return ["--engine", self.engine.url, "--tito-model", "qwen3", "--checkpoint", str(self.checkpoint)]

    def start(self, *more: str, continuous: bool = False) -> None:
        words = [sys.executable, "-m", "miles_core", "rollout", "--prompts", str(self.folder / "prompts.jsonl")]
        words += ["--agent", "one_turn.run_agent", "--output", str(self.output), "--concurrency", str(CONCURRENCY)]
        environment = {**os.environ, "PYTHONPATH": str(self.folder)}
        environment["MILES_EXPERIMENTAL_ROLLOUT_REFACTOR"] = "1" if continuous else ""
        with (self.folder / "log").open("w") as log:
            self.process = subprocess.Popen([*words, *more], stdout=log, stderr=log, env=environment)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def kill_the_engine(self) -> None:
        """When turns are under way that it has not answered."""
        self.engine.wait_for(lambda: len(self.engine.turns) == ANSWERED + CONCURRENCY, 120)
        self.engine.stop()
        self.gate.open()

    def end(self) -> int:
        assert self.process is not None
        return self.process.wait(120)

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.output / "summary.json").read_text())
        return found

    def kept(self) -> list[int]:
        lines = (self.output / "samples.jsonl").read_text().splitlines()
        return sorted(json.loads(line)["prompt_index"] for line in lines)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with fake_engine() as engine:
        run = Run(tmp_path, engine)
        yield run
        if run.process is not None and run.process.poll() is None:
            run.process.kill()
            run.process.wait()


def accounted(summary: dict[str, Any]) -> tuple[int, ...]:
    parts = ("rollouts", "failures", "aborted_rollouts", "filtered_rollouts", "rollouts_not_begun")
    return tuple(summary[part] for part in parts)


@pytest.mark.parametrize("continuous", [False, True])
def test_an_engine_that_comes_back_is_waited_for(run: Run, continuous: bool) -> None:
    more = ["--keep-groups", str(PROMPTS), "--groups-at-once", "4"] if continuous else []
    run.start(*run.direct, "--stop-after-failures", "1", *more, continuous=continuous)
    run.kill_the_engine()
    until(lambda: "no engine answers: waiting up to 300 s (--engine-wait) for one" in run.log, "an outage")
    run.engine.start()
    assert run.end() == 0, run.log
    assert "an engine answers again after" in run.log
    assert run.kept() == list(range(PROMPTS))
    assert accounted(run.summary()) == (PROMPTS, 0, 0, 0, 0)


@pytest.mark.parametrize("served", [False, True])
def test_an_engine_that_stays_away_ends_the_run_and_the_same_command_does_the_rest(run: Run, served: bool) -> None:
    with ExitStack() as stack:
        where = run.serve(stack) if served else run.direct
        run.start(*where, "--engine-wait", "0.2")
        run.kill_the_engine()
        assert run.end() == 1, run.log
        place = f"those behind {where[1]}" if served else run.engine.url
        assert (
            f"Error: no engine has answered for 0.2 s (--engine-wait): {place}\n"
            "  start one; the same command does what is left, and what failed because of it\n"
        ) in run.log
        assert f"{ANSWERED} finished samples are kept" in run.log
        assert accounted(run.summary()) == (ANSWERED, 0, CONCURRENCY, 0, PROMPTS - ANSWERED - CONCURRENCY)
        run.engine.start()
        run.start(*where)
        assert run.end() == 0, run.log
    assert run.kept() == list(range(PROMPTS))
    assert accounted(run.summary()) == (PROMPTS, 0, 0, 0, 0)
