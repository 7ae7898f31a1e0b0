"""Processes of one server that end: by a fault, by a signal, at their start, or with the one above them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from helpers.fake_engine import FakeEngine, Gate, says
from helpers.sessions import Talk, request, user
from helpers.worker_processes import PATIENCE, alive, running, until

pytestmark = pytest.mark.slow
COUNT = 3


@pytest.fixture
def settings(checkpoint: Path, engine: FakeEngine) -> dict[str, Any]:
    return {"checkpoint": str(checkpoint), "tito_model": "qwen3", "engine_urls": [engine.url], "workers": COUNT}


def broken_off(talk: Talk) -> bool:
    """Whether a turn is not answered at all."""
    try:
        talk.post([user("u")])
    except OSError:
        return True
    return False


def test_a_killed_process_is_replaced_and_the_others_go_on(
    tmp_path: Path, settings: dict[str, Any], engine: FakeEngine
) -> None:
    with running(tmp_path, **settings) as server:
        made = [Talk(server.url) for _ in range(2 * COUNT)]
        talks = [next(talk for talk in made if talk.id.startswith(f"0{number}")) for number in range(COUNT)]
        for talk in talks:
            talk.ask(user("hi"))
        lost, pid, gate = talks[1], server.pid_of(talks[1]), Gate()
        engine.plays(says(gate=gate))
        with ThreadPoolExecutor(1) as pool:
            turn = pool.submit(broken_off, lost)
            assert gate.entered.wait(PATIENCE)
            os.kill(pid, signal.SIGKILL)
            assert turn.result(PATIENCE)  # as when a server with one process is killed
        gate.open()
        for _ in range(10):
            assert request(lost.url).error == f"session not found: session_id={lost.id}"
            assert lost.post([user("u")]).status == 404
            for other in (talks[0], talks[2]):
                assert len(other.records) == 1
        server.wait_until_up(COUNT)
        assert request(lost.url).status == 404
        talks[0].ask(user("on"))
        said = server.said
        assert f"process 1 of the session server (pid {pid}) was killed by SIGKILL" in said
        assert f"; with it went {sum(talk.id[:2] == '01' for talk in made)} session" in said
        assert "another takes its place now" in said
        assert "Traceback" not in said
        for number in range(COUNT):
            os.kill(server.pids[number], signal.SIGKILL)
        until(lambda: server.said.count("was killed") == 4 and len(server.pids) == COUNT, "all new")
        server.wait_until_up(COUNT)


def test_one_that_ends_again_and_again_is_waited_for_longer(tmp_path: Path, settings: dict[str, Any]) -> None:
    code = "import miles_core.server.processes as processes\nprocesses.STEADY = 1e9\n"  # however slow this machine is
    with running(tmp_path, code=code, **settings) as server:
        talk = server.talks(COUNT)[0]
        known = set(server.pids)
        for times, when in enumerate(("now", "in 1 s", "in 2 s"), 1):
            pid = next(iter(set(server.pids) - known), None) or server.pids[2]
            os.kill(pid, signal.SIGKILL)
            until(lambda times=times: server.said.count("was killed") == times, "the word of its end")  # type: ignore[misc]
            assert server.said.splitlines()[-1].endswith(f"another takes its place {when}")
            assert talk.post([user("u")]).status == 200
            known |= {pid}
            until(lambda: len(server.pids) == COUNT, "the next")
        assert server.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_lets_turns_end(
    tmp_path: Path, settings: dict[str, Any], engine: FakeEngine, number: int
) -> None:
    with running(tmp_path, **settings) as server:
        talks, pids = server.talks(COUNT), server.pids
        gates = [Gate() for _ in talks]
        engine.plays(*[says(gate=gate) for gate in gates])
        with ThreadPoolExecutor(COUNT) as pool:
            turns = []
            for talk, gate in zip(talks, gates, strict=True):
                turns.append(pool.submit(talk.post, [user("last words")]))
                assert gate.entered.wait(PATIENCE)
            server.process.send_signal(number)
            until(lambda: refused(server.url), "the port is closed")
            for gate in gates:
                gate.open()
            assert [turn.result(PATIENCE).status for turn in turns] == [200] * COUNT
        assert server.process.wait(PATIENCE) == 0
        assert not any(alive(pid) for pid in pids)
        assert server.said == ""


def test_one_that_does_not_end_is_killed(tmp_path: Path, settings: dict[str, Any]) -> None:
    code = "import miles_core.server.processes as processes\nprocesses.GRACE = 0.5\n"
    with running(tmp_path, code=code, **settings) as server:
        pids = server.pids
        os.kill(pids[1], signal.SIGSTOP)
        assert server.stop() == 0
        assert "did not end within 0.5 s of the stop signal: killed" in server.said
        assert not any(alive(pid) for pid in pids)


def refused(url: str) -> bool:
    """Whether nothing listens any more."""
    try:
        request(f"{url}/health", timeout=5)
    except OSError:
        return True
    return False


def test_none_outlives_the_one_above(tmp_path: Path, settings: dict[str, Any]) -> None:
    with running(tmp_path, **settings) as server:
        pids = server.pids
        server.process.kill()
        server.process.wait()
        until(lambda: not any(alive(pid) for pid in pids), "all gone")


def test_a_stop_signal_while_they_start(tmp_path: Path, settings: dict[str, Any]) -> None:
    """It comes when the URL is printed: before the first of them is there."""
    with running(tmp_path, wait=False, **settings) as server:
        assert server.stop() == 0
        assert server.said == ""


@pytest.mark.parametrize("workers", [1, COUNT])
def test_what_is_wrong_at_the_start_is_said_once(tmp_path: Path, settings: dict[str, Any], workers: int) -> None:
    """As with one process: the same word, the same exit code."""
    code = (
        "from miles_core.server.service import SessionService\n"
        "async def start(self): raise OSError('no room for an engine client')\n"
        "SessionService.start = start\n"
    )
    with running(tmp_path, code=code, wait=False, **{**settings, "workers": workers}) as server:
        assert server.process.wait(PATIENCE) == 3
        assert server.said.count("no room for an engine client") == 1


def test_a_port_that_is_taken(tmp_path: Path, settings: dict[str, Any]) -> None:
    with running(tmp_path, **settings) as server:
        port = server.url.rpartition(":")[2]
        flags = ["--checkpoint", settings["checkpoint"], "--tito-model", "qwen3", "--engine", "http://127.0.0.1:9"]
        command = [sys.executable, "-m", "miles_core", "serve", *flags, "--port", port, "--workers", "2"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.returncode == 2
        assert done.stderr.count(f"cannot listen on 127.0.0.1:{port}") == 1
