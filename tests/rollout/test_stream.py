"""Rollouts as a library."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from helpers.fake_generate import FakeGenerate, says, state_of
from helpers.fake_sessions import FakeSessions, serving
from miles_agents.calculator import run_agent
from miles_core.errors import ConfigError
from miles_core.rollout.job import RunOptions
from miles_core.rollout.output import RunDirectory, read_records
from miles_core.rollout.rewards import Reward
from miles_core.rollout.state import FunctionAgent, RolloutArgs, RolloutState
from miles_core.rollout.stream import rollouts
from miles_core.types import GenerateFnInput, GenerateFnOutput, Sample, SampleStatus
from miles_sample_hooks.rewards_differ import keep_group

ROWS: list[dict[str, Any]] = [{"prompt": f"What is {at} + 1?", "label": str(at + 1)} for at in range(3)]


async def all_of(samples: AsyncIterator[Sample]) -> list[Sample]:
    return [sample async for sample in samples]


async def test_samples_of_an_agent_come_as_they_are_finished() -> None:
    async with serving(FakeSessions()) as url:
        state = RolloutState(RolloutArgs(session_server_url=url), agent=FunctionAgent(run_agent))
        samples = await all_of(rollouts(ROWS, "agentic", state, options=RunOptions(samples_per_prompt=2)))
    assert sorted(sample.index or 0 for sample in samples) == list(range(6))
    assert {sample.reward for sample in samples} == {1.0}


async def test_samples_of_the_engine_with_a_reward() -> None:
    async with FakeGenerate().serving() as engine:
        engine.script = [says("It is 1."), says("It is 9.")]
        reward = Reward.of(lambda sample: float(f"is {sample.label}." in sample.response))
        options = RunOptions(concurrency=1)
        samples = await all_of(rollouts(ROWS[:2], "single_turn", state_of(engine.url), options=options, reward=reward))
    assert [sample.reward for sample in samples] == [1.0, 0.0]


async def solved_by_half(given: GenerateFnInput) -> GenerateFnOutput:
    sample = given.sample
    sample.tokens, sample.response_length, sample.status = [1, 2], 1, SampleStatus.COMPLETED
    sample.loss_mask, sample.rollout_log_probs = [1], [-1.0]
    sample.reward = float((sample.index or 0) % 2 and sample.label != "2")
    return GenerateFnOutput(sample)


async def test_enough_groups_end_the_iterator_and_all_of_them_arrive(tmp_path: Path) -> None:
    rows = [*ROWS, *ROWS, *ROWS]
    options = RunOptions(samples_per_prompt=4, continuous=True, keep_groups=3, concurrency=2)
    directory = RunDirectory(tmp_path, {})
    state = RolloutState(RolloutArgs())
    found = []
    async for sample in rollouts(
        rows, solved_by_half, state, options=options, keep_group=keep_group, directory=directory
    ):
        await asyncio.sleep(0.001)  # slower than the rollouts
        found.append(sample.group_index)
    directory.close()
    assert len(found) == 12
    assert Counter(found) == Counter(record["prompt_index"] for record in read_records(tmp_path))
    assert 1 not in found


async def test_leaving_early_aborts_the_rest() -> None:
    started, cancelled = 0, 0

    async def generate(given: GenerateFnInput) -> GenerateFnOutput:
        nonlocal started, cancelled
        started += 1
        if given.sample.index:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled += 1
                raise
        return await solved_by_half(given)

    state = RolloutState(RolloutArgs())
    async with aclosing(rollouts(ROWS, generate, state)) as samples:
        async for _ in samples:
            break
    assert (started, cancelled, state.aborted) == (3, 2, True)


async def test_what_ends_the_run_is_raised() -> None:
    async def generate(given: GenerateFnInput) -> GenerateFnOutput:
        raise ConfigError("install it")

    with pytest.raises(ConfigError, match="install it"):
        await all_of(rollouts(ROWS, generate, RolloutState(RolloutArgs())))


async def test_a_row_that_is_no_prompt_is_named() -> None:
    with pytest.raises(ConfigError, match='prompt 1: neither "messages" nor "prompt"'):
        await all_of(rollouts([ROWS[0], {"text": "x"}], solved_by_half, RolloutState(RolloutArgs())))
