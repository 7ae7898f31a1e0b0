"""Rollouts that fail while no engine answers: put off, once, and accounted for."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.chat_tokenizer import write_checkpoint
from helpers.fake_engine import FakeEngine, Gate, Reply, fake_engine
from miles_core.errors import EnginesGone, EngineUnreachable
from miles_core.rollout import http, outage
from miles_core.rollout.data import Prompt
from miles_core.rollout.engines import Engines
from miles_core.rollout.job import RunOptions
from miles_core.rollout.outage import Outage, engines_answer
from miles_core.rollout.output import FAILURES, RunDirectory
from miles_core.rollout.runner import RolloutRunner
from miles_core.rollout.state import RolloutArgs, RolloutState
from miles_core.server.app import ServerThread
from miles_core.server.settings import ServerSettings
from miles_core.types import GenerateFnInput, GenerateFnOutput, Sample, SampleStatus

PROMPTS = [Prompt(at, [{"role": "user", "content": f"{at}"}], None, {}, f"{at:016x}") for at in range(6)]


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with fake_engine() as found:
        yield found


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outage, "BETWEEN", 0.001)


def health(engine: FakeEngine, *statuses: int) -> list[int]:
    """What its `/health` answers, the last over and over; returns what is left."""
    left = list(statuses)
    engine.answers["/health"] = lambda body: Reply(body=b"", status=left.pop(0) if left[1:] else left[0])
    return left


def state_of(*urls: str) -> RolloutState:
    return RolloutState(RolloutArgs(), engines=Engines(urls))


def finish(sample: Sample) -> GenerateFnOutput:
    sample.tokens, sample.response_length = [1, 2], 1
    sample.loss_mask, sample.rollout_log_probs, sample.status = [1], [-0.5], SampleStatus.COMPLETED
    return GenerateFnOutput(sample)


@pytest.mark.parametrize(("status", "up"), [(200, True), (404, True), (401, True), (503, False), (500, False)])
async def test_an_engine_answers_or_not(engine: FakeEngine, status: int, up: bool) -> None:
    health(engine, status)
    assert await engines_answer(state_of(engine.url)) is up


async def test_one_of_several_is_enough(engine: FakeEngine, unused_tcp_port: int) -> None:
    assert await engines_answer(state_of(f"http://127.0.0.1:{unused_tcp_port}", engine.url))
    engine.stop()
    assert not await engines_answer(state_of(f"http://127.0.0.1:{unused_tcp_port}", engine.url))


async def test_one_that_takes_connections_and_never_answers_is_none(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    engine.answers["/health"] = lambda body: Reply(body=b"", gate=gate)
    with fake_engine() as other:
        assert await engines_answer(state_of(engine.url, other.url)), "nobody waits for it where another answers"
    monkeypatch.setattr(http, "HEALTH_TIMEOUT", 0.05)
    assert not await engines_answer(state_of(engine.url))
    gate.open()


@pytest.mark.parametrize("key", [None, "k"])
async def test_of_several_behind_a_session_server_one_is_enough(
    engine: FakeEngine, tmp_path: Path, unused_tcp_port: int, key: str | None
) -> None:
    urls = (f"http://127.0.0.1:{unused_tcp_port}", engine.url)
    settings = ServerSettings(
        checkpoint=str(write_checkpoint(tmp_path)), tito_model="qwen3", engine_urls=urls, engine_health_seconds=0,
        api_key=key,
    )  # fmt: skip
    with ServerThread(settings) as server:
        state = RolloutState(RolloutArgs(session_server_url=server.url, session_api_key=key))
        assert [await engines_answer(state) for _ in range(4)] == [True] * 4
        engine.stop()
        assert not await engines_answer(state)
    assert not await engines_answer(state)


async def test_where_nobody_can_tell_one_answers() -> None:
    assert await engines_answer(RolloutState(RolloutArgs()))


async def test_what_is_no_session_server_is_no_reason_to_wait(engine: FakeEngine, unused_tcp_port: int) -> None:
    assert await engines_answer(RolloutState(RolloutArgs(session_server_url=engine.url)))
    gone = RolloutState(RolloutArgs(session_server_url=f"http://127.0.0.1:{unused_tcp_port}"))
    assert not await engines_answer(gone)


async def test_a_rollout_is_begun_anew_once(tmp_path: Path, engine: FakeEngine) -> None:
    """The second time it fails, even with no engine, it may be what kills them."""
    health(engine, 503, 503, 200, 503)
    began: list[int | None] = []

    async def generate(given: GenerateFnInput) -> GenerateFnOutput:
        began.append(given.sample.index)
        if given.sample.index == 2:
            given.sample.metadata["left"] = "over"
            raise EngineUnreachable(f"attempt {len(began)}")
        return finish(given.sample)

    directory = RunDirectory(tmp_path, {})
    runner = RolloutRunner(state_of(engine.url), generate, directory, RunOptions(concurrency=1, engine_wait=60))
    await runner.run(runner.jobs(PROMPTS))
    directory.close()
    assert began == [0, 1, 2, 2, 3, 4, 5]
    assert (runner.tally.failures, runner.tally.samples, runner.tally.aborted) == (1, 5, 0)
    (failure,) = [json.loads(line) for line in (tmp_path / FAILURES).read_text().splitlines()]
    assert (failure["prompt_index"], failure["error"]) == (2, "EngineUnreachable: attempt 4")


async def test_a_failure_while_an_engine_answers_is_one(engine: FakeEngine) -> None:
    async def generate(given: GenerateFnInput) -> GenerateFnOutput:
        raise ConnectionError("not the engine")

    runner = RolloutRunner(state_of(engine.url), generate, None, RunOptions())
    await runner.run(runner.jobs(PROMPTS))
    assert runner.tally.failures == 6


async def test_an_interrupt_while_it_waits_leaves_nothing_behind(engine: FakeEngine) -> None:
    left = health(engine, 503, 503, 503)

    async def generate(given: GenerateFnInput) -> GenerateFnOutput:
        raise ConnectionError("no engine")

    runner = RolloutRunner(state_of(engine.url), generate, None, RunOptions(concurrency=2, engine_wait=600))
    work = asyncio.create_task(runner.run(runner.jobs(PROMPTS)))
    while len(left) > 1:  # noqa: ASYNC110  # the engine only counts them
        await asyncio.sleep(0)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    tally = runner.tally
    assert (tally.failures, tally.aborted, tally.not_begun, tally.running) == (0, 2, 4, 0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_all_wait_together_and_give_up_together(engine: FakeEngine) -> None:
    health(engine, 503)
    waiting = Outage(state_of(engine.url), 0.0)
    results = await asyncio.gather(waiting.was(0.0), waiting.was(0.0), return_exceptions=True)
    assert all(isinstance(result, EnginesGone) for result in results)
    assert results[0] is results[1]


async def test_what_began_before_an_outage_was_over_may_fail_of_it_later(engine: FakeEngine) -> None:
    health(engine, 503, 200)
    waiting, before = Outage(state_of(engine.url), 60), time.monotonic()
    assert await waiting.was(before)
    assert await waiting.was(before), "its own failure took longer to arrive"
    assert not await waiting.was(time.monotonic())
