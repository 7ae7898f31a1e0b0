"""Running rollouts: concurrency, failures, resuming, interrupts, seeds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miles_core.errors import ConfigError
from miles_core.rollout.data import Prompt
from miles_core.rollout.job import Job, RunOptions, sample_seed
from miles_core.rollout.output import FAILURES, RunDirectory, read_records
from miles_core.rollout.runner import RolloutRunner
from miles_core.rollout.state import RolloutArgs, RolloutState
from miles_core.types import GenerateFnInput, GenerateFnOutput, Sample, SampleStatus

PROMPTS = [Prompt(at, [{"role": "user", "content": str(at)}], str(at), {"n": [at]}, f"{at:016x}") for at in range(3)]


def finish(sample: Sample) -> Sample:
    """A finished sample of three tokens."""
    sample.tokens, sample.response_length = [1, 2, 3], 2
    sample.loss_mask, sample.rollout_log_probs = [1, 0], [-0.5, 0.0]
    sample.status, sample.reward = SampleStatus.COMPLETED, 1.0
    return sample


async def good(given: GenerateFnInput) -> GenerateFnOutput:
    return GenerateFnOutput(finish(given.sample))


class Agent:
    """A plugin with an abort that counts."""

    def __init__(self, error: Exception | None = None) -> None:
        self.aborts: list[Any] = []
        self.error = error

    def has(self, hook: str) -> bool:
        return hook == "abort"

    def hook(self, hook: str) -> Callable[..., Any]:
        async def abort(args: Any) -> None:
            self.aborts.append(args)
            if self.error:
                raise self.error

        return abort


async def run(path: Path, generate: Any, agent: Agent | None = None, **options: Any) -> RolloutRunner:
    directory = RunDirectory(path, {})
    state = RolloutState(RolloutArgs(), agent=agent, sampling_params={"temperature": 1.0})
    runner = RolloutRunner(state, generate, directory, RunOptions(**options))
    try:
        await runner.run(runner.jobs(PROMPTS))
    finally:
        directory.close()
    return runner


def keys(path: Path) -> list[tuple[int, int]]:
    return sorted((each["prompt_index"], each["sample_index"]) for each in read_records(path))


def failures(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / FAILURES).read_text().splitlines()]


ALL = [(prompt, at) for prompt in range(3) for at in range(2)]


async def test_every_sample_of_every_prompt(tmp_path: Path) -> None:
    runner = await run(tmp_path, good, samples_per_prompt=2)
    assert keys(tmp_path) == ALL
    assert (runner.tally.samples, runner.tally.resumed) == (6, 0)
    records = sorted(read_records(tmp_path), key=lambda each: int(each["index"]))
    assert [each["index"] for each in records] == list(range(6))
    assert [each["group_index"] for each in records] == [0, 0, 1, 1, 2, 2]
    assert [each["label"] for each in records][::2] == ["0", "1", "2"]


async def test_no_more_than_concurrency_at_once(tmp_path: Path) -> None:
    running, most = 0, 0

    async def generate(given: GenerateFnInput) -> GenerateFnOutput:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return await good(given)

    await run(tmp_path, generate, samples_per_prompt=4, concurrency=3)
    assert most == 3


@pytest.mark.parametrize("error", [ValueError("no luck"), SystemExit(3), asyncio.CancelledError()])
async def test_a_failing_rollout_costs_itself_and_is_tried_again(tmp_path: Path, error: BaseException) -> None:
    calls: list[str] = []

    async def generate(given: GenerateFnInput) -> GenerateFnOutput:
        calls.append(given.sample.label)
        if given.sample.label == "1":
            raise error
        return await good(given)

    runner = await run(tmp_path, generate)
    assert (runner.tally.samples, runner.tally.failures) == (2, 1)
    failure = failures(tmp_path)[0]
    assert (failure["prompt_index"], failure["sample_index"]) == (1, 0)
    assert failure["error"]
    calls.clear()
    runner = await run(tmp_path, good)
    assert (runner.tally.samples, runner.tally.resumed, runner.tally.failures) == (3, 2, 0)
    assert keys(tmp_path) == [(0, 0), (1, 0), (2, 0)]


async def test_what_cannot_be_written_is_a_failure(tmp_path: Path) -> None:
    async def generate(given: GenerateFnInput) -> GenerateFnOutput:
        output = await good(given)
        output.as_list()[0].metadata["x"] = float("nan")
        return output

    runner = await run(tmp_path, generate)
    assert runner.tally.failures == 3
    assert "field 'metadata'" in failures(tmp_path)[0]["error"]


async def test_a_reward_of_a_wrong_type_is_a_failure(tmp_path: Path) -> None:
    async def generate(given: GenerateFnInput) -> GenerateFnOutput:
        output = await good(given)
        output.as_list()[0].reward = "good"  # type: ignore[assignment]
        return output

    await run(tmp_path, generate)
    assert "the reward 'good' is a str" in failures(tmp_path)[0]["error"]


async def test_a_sample_that_contradicts_itself_is_a_failure(tmp_path: Path) -> None:
    async def generate(given: GenerateFnInput) -> GenerateFnOutput:
        output = await good(given)
        output.as_list()[0].loss_mask = [1]
        return output

    await run(tmp_path, generate)
    assert "loss_mask has 1 entries, response_length is 2" in failures(tmp_path)[0]["error"]


async def test_aborted_without_a_token_is_a_failure(tmp_path: Path) -> None:
    async def generate(given: GenerateFnInput) -> GenerateFnOutput:
        given.sample.status = SampleStatus.ABORTED
        given.sample.metadata["agent_error"] = "ValueError: why"
        return GenerateFnOutput(given.sample)

    await run(tmp_path, generate)
    assert [each["error"] for each in failures(tmp_path)] == ["ValueError: why"] * 3


async def test_a_rollout_over_time_is_a_failure(tmp_path: Path) -> None:
    async def generate(given: GenerateFnInput) -> GenerateFnOutput:
        await asyncio.Event().wait()
        return await good(given)

    await run(tmp_path, generate, sample_timeout=0.01)
    assert failures(tmp_path)[0]["error"] == "not finished within 0.01 s (--sample-timeout)"


async def test_wrong_configuration_stops_the_run(tmp_path: Path) -> None:
    async def generate(given: GenerateFnInput) -> GenerateFnOutput:
        raise ConfigError("install it")

    with pytest.raises(ConfigError, match="install it"):
        await run(tmp_path, generate)


async def test_siblings_share_a_key(tmp_path: Path) -> None:
    async def generate(given: GenerateFnInput) -> GenerateFnOutput:
        return GenerateFnOutput([finish(Sample()), finish(Sample())])

    runner = await run(tmp_path, generate)
    assert (runner.tally.samples, runner.tally.rollouts) == (6, 3)
    leaves = [(each["prompt_index"], each["leaf_index"], each["leaf_count"]) for each in read_records(tmp_path)]
    assert sorted(leaves) == [(prompt, leaf, 2) for prompt in range(3) for leaf in range(2)]


async def test_samples_do_not_share_their_prompt(tmp_path: Path) -> None:
    async def generate(given: GenerateFnInput) -> GenerateFnOutput:
        given.sample.metadata["n"].append("mine")
        return await good(given)

    await run(tmp_path, generate, samples_per_prompt=3)
    assert PROMPTS[0].metadata == {"n": [0]}


async def test_an_interrupt_keeps_what_is_finished_and_resumes(tmp_path: Path) -> None:
    agent = Agent()
    stuck = asyncio.Event()

    async def generate(given: GenerateFnInput) -> GenerateFnOutput:
        if given.sample.label == "1":
            stuck.set()
            await asyncio.Event().wait()
        return await good(given)

    task = asyncio.create_task(run(tmp_path, generate, agent, samples_per_prompt=2, concurrency=1))
    await stuck.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert keys(tmp_path) == [(0, 0), (0, 1)]
    assert len(agent.aborts) == 1
    runner = await run(tmp_path, good, samples_per_prompt=2)
    assert keys(tmp_path) == ALL
    assert runner.tally.resumed == 2


@pytest.mark.parametrize("error", [None, ValueError("x")])
async def test_abort_is_called_at_the_end_and_may_fail(tmp_path: Path, error: Exception | None) -> None:
    agent = Agent(error)
    runner = await run(tmp_path, good, agent)
    assert agent.aborts == [runner.state.args]
    assert runner.state.aborted


async def test_each_sample_has_its_own_seed_and_always_the_same(tmp_path: Path) -> None:
    seen: dict[int | None, int] = {}

    async def generate(given: GenerateFnInput) -> GenerateFnOutput:
        seen[given.sample.index] = given.sampling_params["sampling_seed"]
        assert given.sampling_params["temperature"] == 1.0
        return await good(given)

    await run(tmp_path, generate, samples_per_prompt=2, seed=7)
    assert len(set(seen.values())) == 6
    assert seen[3] == sample_seed(7, Job(PROMPTS[1], 1))
    assert sample_seed(7, Job(PROMPTS[1], 1)) != sample_seed(8, Job(PROMPTS[1], 1))
    assert all(0 <= seed < 2**31 for seed in seen.values())


async def test_an_interrupt_while_a_sample_is_written_counts_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is kept, since the folder writes it when it closes; so it was not aborted."""
    writing = asyncio.Event()

    async def flush(self: RunDirectory) -> None:
        writing.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(RunDirectory, "flush", flush)
    directory = RunDirectory(tmp_path, {})
    runner = RolloutRunner(RolloutState(RolloutArgs()), good, directory, RunOptions(concurrency=1))
    task = asyncio.create_task(runner.run(runner.jobs(PROMPTS)))
    await writing.wait()
    task.cancel()
    await asyncio.wait([task])
    directory.close()
    tally = runner.tally
    assert (tally.samples, tally.aborted, tally.not_begun, tally.failures) == (1, 0, 2, 0)
    assert keys(tmp_path) == [(0, 0)]
