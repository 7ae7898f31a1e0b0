"""What is measured in each step, and that a run which only fails ends early."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from miles_core.rollout.alike import Alike, RolloutFailed
from miles_core.rollout.data import Prompt
from miles_core.rollout.job import RunOptions
from miles_core.rollout.metrics import spread
from miles_core.rollout.output import FAILURES, METRICS, RunDirectory
from miles_core.rollout.rewards import Reward
from miles_core.rollout.runner import RolloutRunner
from miles_core.rollout.state import RolloutArgs, RolloutState
from miles_core.types import GenerateFnInput, GenerateFnOutput, Sample, SampleStatus
from miles_sample_hooks.rewards_differ import keep_group


def prompts(count: int) -> list[Prompt]:
    return [Prompt(at, [{"role": "user", "content": f"{at}"}], at, {}, f"{at:016x}") for at in range(count)]


def finish(sample: Sample, reward: Any, *, tokens: int = 4, status: SampleStatus = SampleStatus.COMPLETED) -> Sample:
    sample.tokens, sample.response_length = [1] * tokens, tokens - 1
    sample.loss_mask, sample.rollout_log_probs = [1] * (tokens - 1), [-0.5] * (tokens - 1)
    sample.status, sample.reward, sample.non_generation_time = status, reward, 0.25
    return sample


async def run(path: Path, generate: Any, count: int, reward: Reward | None = None, **options: Any) -> RolloutRunner:
    directory = RunDirectory(path, {})
    state = RolloutState(RolloutArgs(reward_key="score"))
    keep = keep_group if options.get("continuous") else None
    try:
        runner = RolloutRunner(state, generate, directory, RunOptions(**options), reward=reward, keep_group=keep)
        await runner.run(runner.jobs(prompts(count)))
    finally:
        directory.close()
    return runner


def steps(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / METRICS).read_text().splitlines()]


async def by_index(given: GenerateFnInput) -> GenerateFnOutput:
    """Two leaves of which the first counts; prompt 0 differs inside, prompt 1 is all 0, prompt 2 all 1; one fails."""
    prompt, at = divmod(given.sample.index or 0, 2)
    if (prompt, at) == (3, 1):
        raise ValueError("no luck")
    reward = {"score": float(at if prompt == 0 else prompt > 1), "other": 9.0}
    status = SampleStatus.TRUNCATED if at else SampleStatus.COMPLETED
    leaves = [finish(given.sample, reward, status=status), finish(Sample(), {"score": 100.0}, tokens=8)]
    return GenerateFnOutput(leaves)


async def test_each_step_has_a_line(tmp_path: Path) -> None:
    runner = await run(tmp_path, by_index, 4, samples_per_prompt=2, metrics_prompts=3, concurrency=1)
    first, second = steps(tmp_path)
    assert (first["step"], first["rollouts"], first["samples"], first["failures"]) == (0, 6, 12, 0)
    assert first["reward"] == {"count": 6, "mean": 0.5, "std": 0.5, "min": 0.0, "max": 1.0}
    assert first["groups"] == {"count": 3, "reward_std": pytest.approx(0.5 / 3), "equal": 2, "all_zero": 1}
    assert first["response_length"] == {"count": 12, "mean": 5.0, "std": 2.0, "min": 3, "max": 7}
    assert (first["truncated_ratio"], first["aborted_ratio"]) == (0.25, 0.0)
    assert (first["tokens"], first["response_tokens"], first["trained_tokens"]) == (72, 60, 60)
    assert first["tool_seconds"]["mean"] == 0.25
    assert first["tokens_per_s"] > 0
    assert (second["step"], second["rollouts"], second["failures"], second["groups"]["count"]) == (1, 2, 1, 1)
    assert runner.tally.reward.mean == pytest.approx(4 / 7), "of several rewards, the one that is named"


async def test_steps_go_on_counting_in_the_next_run(tmp_path: Path) -> None:
    await run(tmp_path, by_index, 1, samples_per_prompt=2)
    await run(tmp_path, by_index, 3, samples_per_prompt=2, metrics_prompts=1)
    assert [(step["step"], step["rollouts"]) for step in steps(tmp_path)] == [(0, 2), (1, 2), (2, 2)]


async def test_what_a_filter_leaves_out_is_part_of_the_step(tmp_path: Path) -> None:
    await run(tmp_path, by_index, 4, samples_per_prompt=2, continuous=True)
    (step,) = steps(tmp_path)
    assert (step["rollouts"], step["filtered_groups"], step["filtered_rollouts"], step["failures"]) == (8, 3, 5, 1)
    assert (step["samples"], step["groups"]["count"], step["groups"]["equal"]) == (4, 1, 0)


def test_spread_of_nothing() -> None:
    assert spread([]) == {"count": 0, "mean": None, "std": None, "min": None, "max": None}


# -- failing alike ---------------------------------------------------------------------------------------------


def failures(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / FAILURES).read_text().splitlines()]


async def test_a_run_in_which_everything_fails_alike_ends_early(tmp_path: Path) -> None:
    async def generate(given: GenerateFnInput) -> GenerateFnOutput:
        raise ConnectionError(f"session {given.sample.index:032x}: no answer after {given.sample.index} s")

    with pytest.raises(RolloutFailed) as raised:
        await run(tmp_path, generate, 100, stop_after_failures=5, concurrency=2)
    assert raised.value.message == (
        f"5 rollouts in a row failed with the same error: {failures(tmp_path)[0]['error']}\n"
        "  so no more were begun; the same command tries again, and --stop-after-failures 0 never stops early"
    )
    assert 5 <= len(failures(tmp_path)) <= 6, "the other one that was under way may have failed too"


@pytest.mark.parametrize("limit", [None, 200])
async def test_it_can_be_told_to_go_on(tmp_path: Path, limit: int | None) -> None:
    async def generate(given: GenerateFnInput) -> GenerateFnOutput:
        raise ValueError("no luck")

    runner = await run(tmp_path, generate, 100, stop_after_failures=limit)
    assert (runner.tally.failures, len(failures(tmp_path)), runner.tally.not_begun) == (100, 100, 0)


async def test_a_success_or_another_error_begins_a_new_row(tmp_path: Path) -> None:
    """What goes wrong for good in the middle of a run ends it as well."""

    async def at_times(given: GenerateFnInput) -> GenerateFnOutput:
        at = given.sample.index or 0
        if at % 3 == 0 and at < 12:
            return GenerateFnOutput(finish(given.sample, 1.0))
        raise ValueError("no luck")

    with pytest.raises(RolloutFailed, match="3 rollouts in a row failed with the same error: ValueError: no luck"):
        await run(tmp_path / "a", at_times, 20, stop_after_failures=3, concurrency=1)
    assert [failure["prompt_index"] for failure in failures(tmp_path / "a")] == [1, 2, 4, 5, 7, 8, 10, 11, 12]

    async def differently(given: GenerateFnInput) -> GenerateFnOutput:
        raise (TypeError if (given.sample.index or 0) % 3 else ValueError)("no luck")

    runner = await run(tmp_path / "b", differently, 20, stop_after_failures=3, concurrency=1)
    assert runner.tally.failures == 20


async def test_a_short_trouble_of_all_that_are_under_way_does_not_end_a_run(tmp_path: Path) -> None:
    under_way, trouble = asyncio.Barrier(8), asyncio.Barrier(8)

    async def generate(given: GenerateFnInput) -> GenerateFnOutput:
        at = given.sample.index or 0
        if 1 <= at <= 8:
            await under_way.wait()
            raise ConnectionError("the tool's server was started again")
        if at > 8:
            await trouble.wait()  # until all eight have failed
        return GenerateFnOutput(finish(given.sample, 1.0))

    runner = await run(tmp_path, generate, 17, stop_after_failures=3, concurrency=8)
    assert (runner.tally.failures, runner.tally.samples) == (8, 9)


async def test_group_rewards_that_always_fail_end_the_run_too(tmp_path: Path) -> None:
    """The rollouts themselves go well: it is their groups that all fail."""

    async def reward(samples: list[Sample]) -> list[float]:
        raise KeyError("answer")

    async def good(given: GenerateFnInput) -> GenerateFnOutput:
        return GenerateFnOutput(finish(given.sample, None))

    def run_it(count: int) -> Any:
        scored = Reward.of(reward, per_group=True)
        return run(tmp_path, good, count, scored, samples_per_prompt=1, stop_after_failures=4, concurrency=1)

    with pytest.raises(RolloutFailed, match="4 rollouts in a row failed with the same error: KeyError: 'answer'"):
        await run_it(50)


def test_numbers_and_ids_do_not_make_errors_differ() -> None:
    alike = Alike(2)
    alike.failed("session 0123abcd99 on 127.0.0.1:8000 died after 3.2 s")
    alike.check()
    alike.failed("session fedc000011 on 127.0.0.2:8001 died after 11.0 s")
    with pytest.raises(RolloutFailed):
        alike.check()
