"""Groups: rewards, filters, enough of them, and an account of every rollout."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miles_core.errors import ConfigError, PluginContractError
from miles_core.rollout.data import Prompt
from miles_core.rollout.job import RunOptions
from miles_core.rollout.output import FAILURES, FILTERED, SAMPLES, RunDirectory, read_records
from miles_core.rollout.rewards import Reward
from miles_core.rollout.runner import RolloutRunner
from miles_core.rollout.state import RolloutArgs, RolloutState
from miles_core.types import GenerateFnInput, GenerateFnOutput, Sample, SampleStatus
from miles_sample_hooks.rewards_differ import keep_group as rewards_differ


def prompts(count: int) -> list[Prompt]:
    return [Prompt(at, [{"role": "user", "content": str(at)}], str(at), {}, f"{at:016x}") for at in range(count)]


def finish(sample: Sample, reward: Any = None) -> Sample:
    sample.tokens, sample.response_length = [1, 2, 3], 2
    sample.loss_mask, sample.rollout_log_probs = [1, 0], [-0.5, 0.0]
    sample.status, sample.reward = SampleStatus.COMPLETED, reward
    return sample


async def by_prompt(given: GenerateFnInput) -> GenerateFnOutput:
    """Even prompts are solved by some rollouts, odd ones by all."""
    await asyncio.sleep(0)
    index, prompt = given.sample.index or 0, int(given.sample.label)
    return GenerateFnOutput(finish(given.sample, 1.0 if prompt % 2 else float(index % 2)))


async def run(
    path: Path,
    generate: Any = by_prompt,
    *,
    count: int = 4,
    reward: Reward | None = None,
    keep_group: Any = None,
    continuous: bool = True,
    agent: Any = None,
    **options: Any,
) -> RolloutRunner:
    directory = RunDirectory(path, {})
    state = RolloutState(RolloutArgs(), agent=agent)
    try:
        settings = RunOptions(**{"samples_per_prompt": 4, "continuous": continuous, **options})
        runner = RolloutRunner(state, generate, directory, settings, reward=reward, keep_group=keep_group)
        await runner.run(runner.jobs(prompts(count)))
    finally:
        directory.close()
    return runner


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def kept(path: Path) -> list[int]:
    """Prompts of the samples, in the order in which they were written."""
    return [record["prompt_index"] for record in read_records(path)]


async def test_a_filter_keeps_groups_whose_rewards_differ(tmp_path: Path) -> None:
    runner = await run(tmp_path, keep_group=rewards_differ)
    assert sorted(kept(tmp_path)) == [0] * 4 + [2] * 4
    assert [(note["prompt_index"], note["rollouts"]) for note in lines(tmp_path / FILTERED)] == [(1, 4), (3, 4)]
    assert (runner.tally.groups_kept, runner.tally.groups_filtered, runner.tally.failures) == (2, 2, 0)
    assert {record["group_lines"] for record in read_records(tmp_path)} == {4}


async def test_a_resumed_run_does_not_repeat_what_was_left_out(tmp_path: Path) -> None:
    await run(tmp_path, keep_group=rewards_differ)
    runner = await run(tmp_path, keep_group=rewards_differ, count=6)
    assert sorted(kept(tmp_path)) == [0] * 4 + [2] * 4 + [4] * 4
    assert len(lines(tmp_path / FILTERED)) == 3
    assert (runner.tally.groups_kept, runner.tally.groups_filtered) == (3, 3)


async def test_groups_of_a_crash_are_whole_or_not_there(tmp_path: Path) -> None:
    await run(tmp_path, keep_group=rewards_differ)
    data = (tmp_path / SAMPLES).read_bytes().splitlines(keepends=True)
    (tmp_path / SAMPLES).write_bytes(b"".join(data[:-2]))
    await run(tmp_path, keep_group=rewards_differ)
    assert sorted(kept(tmp_path)) == [0] * 4 + [2] * 4
    assert len({(record["prompt_index"], record["sample_index"]) for record in read_records(tmp_path)}) == 8


class Agent:
    """Counts aborts."""

    def __init__(self) -> None:
        self.aborts = 0

    def has(self, hook: str) -> bool:
        return hook == "abort"

    def hook(self, hook: str) -> Any:
        async def abort(args: Any) -> None:
            self.aborts += 1

        return abort


async def test_enough_groups_abort_the_rest(tmp_path: Path) -> None:
    cancelled: list[str] = []
    never = asyncio.Event()

    async def generate(given: GenerateFnInput) -> GenerateFnOutput:
        if int(given.sample.label) >= 3:
            try:
                await never.wait()
            except asyncio.CancelledError:
                cancelled.append(given.sample.label)
                raise
        return await by_prompt(given)

    agent = Agent()
    runner = await run(tmp_path, generate, count=10, keep_groups=2, agent=agent, concurrency=64)
    assert len(kept(tmp_path)) == 8
    tally = runner.tally
    assert (tally.groups_kept, agent.aborts) == (2, 1)
    assert len(cancelled) == 28
    assert tally.samples + tally.aborted + tally.failures == 40, "the third group was over, and not wanted"
    assert runner.state.aborted
    again = await run(tmp_path, generate, count=10, keep_groups=2)
    assert again.tally.resumed == 8
    assert len(kept(tmp_path)) == 8


async def test_a_group_that_is_kept_as_the_run_is_interrupted_is_kept_whole(tmp_path: Path) -> None:
    def interrupts(args: Any, samples: Sequence[Sample]) -> bool:
        if not task.cancelling():
            task.cancel()
        return True

    directory = RunDirectory(tmp_path, {})
    options = RunOptions(samples_per_prompt=4, continuous=True, concurrency=4)
    runner = RolloutRunner(RolloutState(RolloutArgs()), by_prompt, directory, options, keep_group=interrupts)
    task = asyncio.create_task(runner.run(runner.jobs(prompts(3))))
    await asyncio.wait([task])
    directory.close()
    tally = runner.tally
    assert tally.groups_kept >= 1
    assert len(kept(tmp_path)) == tally.rollouts == 4 * tally.groups_kept
    assert tally.rollouts + tally.aborted + tally.not_begun == 12


async def test_more_groups_may_be_wanted_later(tmp_path: Path) -> None:
    await run(tmp_path, count=6, keep_groups=1, concurrency=4)
    await run(tmp_path, count=6, keep_groups=3, concurrency=4)
    assert sorted(set(kept(tmp_path))) == [0, 1, 2]
    assert len(kept(tmp_path)) == 12


async def test_no_more_groups_at_once_than_allowed(tmp_path: Path) -> None:
    running: set[str] = set()
    most = 0

    async def generate(given: GenerateFnInput) -> GenerateFnOutput:
        nonlocal most
        running.add(given.sample.label)
        most = max(most, len(running))
        await asyncio.sleep(0.001)
        if (given.sample.index or 0) % 4 == 3:
            await asyncio.sleep(0.005)
            running.discard(given.sample.label)
        return await by_prompt(given)

    await run(tmp_path, generate, count=8, groups_at_once=2, keep_group=lambda args, samples: True)
    assert most == 2
    assert len(kept(tmp_path)) == 32


@pytest.mark.parametrize("options", [{"keep_groups": 1}, {"groups_at_once": 1}, {"keep_group": rewards_differ}])
async def test_the_plain_loop_says_what_it_does_not_do(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="set MILES_EXPERIMENTAL_ROLLOUT_REFACTOR=1"):
        await run(tmp_path, continuous=False, **options)


@pytest.mark.parametrize("answer", [SimpleNamespace(keep=False, reason="too easy"), False])
async def test_a_filter_may_give_a_reason(tmp_path: Path, answer: Any) -> None:
    await run(tmp_path, count=1, keep_group=lambda args, samples: answer)
    (note,) = lines(tmp_path / FILTERED)
    assert note["reason"] == getattr(answer, "reason", "the filter left it out")


async def test_a_filter_that_answers_otherwise_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(PluginContractError, match="the group filter returned 1; expected True, False"):
        await run(tmp_path, keep_group=lambda args, samples: 1)


async def test_a_filter_that_raises_fails_the_group(tmp_path: Path) -> None:
    def broken(args: Any, samples: Sequence[Sample]) -> bool:
        raise ValueError("cannot tell")

    runner = await run(tmp_path, count=2, keep_group=broken)
    assert runner.tally.failures == 8
    assert {each["error"] for each in lines(tmp_path / FAILURES)} == {"ValueError: cannot tell"}
    assert len((await run(tmp_path, count=2)).done) == 0


async def test_a_failed_rollout_does_not_hold_its_group(tmp_path: Path) -> None:
    async def generate(given: GenerateFnInput) -> GenerateFnOutput:
        if given.sample.index == 1:
            raise ValueError("no luck")
        return await by_prompt(given)

    runner = await run(tmp_path, generate, count=1, keep_group=lambda args, samples: len(samples) == 3)
    assert (len(kept(tmp_path)), runner.tally.failures, runner.tally.groups_kept) == (3, 1, 1)


async def test_the_filter_sees_one_sample_of_each_rollout(tmp_path: Path) -> None:
    async def generate(given: GenerateFnInput) -> GenerateFnOutput:
        leaf = finish(Sample(index=given.sample.index), 9.0)
        return GenerateFnOutput([finish(given.sample, float(given.sample.index or 0)), leaf])

    seen: list[list[Any]] = []

    def look(args: Any, samples: Sequence[Sample]) -> bool:
        seen.append([sample.reward for sample in samples])
        return True

    runner = await run(tmp_path, generate, count=1, keep_group=look)
    assert seen == [[0.0, 1.0, 2.0, 3.0]]
    assert (runner.tally.samples, runner.tally.rollouts, runner.tally.reward.mean) == (8, 4, 1.5)


# -- rewards -------------------------------------------------------------------------------------------------


async def scored(args: Any, sample: Sample) -> float:
    return float(sample.label) + (sample.index or 0) / 10


def plain(sample: Sample) -> dict[str, float]:
    return {"score": float(sample.label)}


async def ranked(args: Any, samples: list[Sample]) -> list[float]:
    return [float(at) for at in range(len(samples))]


@pytest.mark.parametrize("continuous", [True, False])
async def test_a_reward_function_for_each_sample(tmp_path: Path, continuous: bool) -> None:
    await run(tmp_path, count=2, samples_per_prompt=2, reward=Reward.of(scored), continuous=continuous)
    rewards = {(each["prompt_index"], each["sample_index"]): each["reward"] for each in read_records(tmp_path)}
    assert rewards == {(0, 0): 0.0, (0, 1): 0.1, (1, 0): 1.2, (1, 1): 1.3}


async def test_a_plain_reward_function_of_the_sample_alone(tmp_path: Path) -> None:
    await run(tmp_path, count=1, samples_per_prompt=1, reward=Reward.of(plain))
    assert [each["reward"] for each in read_records(tmp_path)] == [{"score": 0.0}]


@pytest.mark.parametrize("continuous", [True, False])
async def test_rewards_of_a_group_in_the_order_of_its_rollouts(tmp_path: Path, continuous: bool) -> None:
    async def generate(given: GenerateFnInput) -> GenerateFnOutput:
        await asyncio.sleep(0.01 * (3 - (given.sample.index or 0) % 4))  # the last is the first to finish
        return await by_prompt(given)

    await run(tmp_path, generate, count=2, reward=Reward.of(ranked, per_group=True), continuous=continuous)
    assert {each["sample_index"]: each["reward"] for each in read_records(tmp_path)} == {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0}


@pytest.mark.parametrize(
    ("value", "text"),
    [("good", "TypeError: the reward 'good' is a str"), (float("nan"), "ValueError: the reward nan")],
)
async def test_a_wrong_reward_fails_the_rollout(tmp_path: Path, value: Any, text: str) -> None:
    runner = await run(tmp_path, count=1, samples_per_prompt=1, reward=Reward.of(lambda sample: value))
    assert runner.tally.failures == 1
    assert lines(tmp_path / FAILURES)[0]["error"].startswith(text)


async def test_a_group_needs_a_reward_for_each(tmp_path: Path) -> None:
    with pytest.raises(PluginContractError, match="returned 1 rewards for a group of 4 samples"):
        await run(tmp_path, reward=Reward.of(lambda samples: [1.0], per_group=True))


async def test_group_rewards_across_leaves_are_refused(tmp_path: Path) -> None:
    async def generate(given: GenerateFnInput) -> GenerateFnOutput:
        return GenerateFnOutput([finish(given.sample), finish(Sample())])

    with pytest.raises(ConfigError, match=r"gave several leaves: use --history linear, or .* without --group-reward"):
        await run(tmp_path, generate, reward=Reward.of(ranked, per_group=True))


def three(a: Any, b: Any, c: Any) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("no.such", "--reward-function no.such: No module named 'no'"),
        ("json.dump_s", "--reward-function json.dump_s: module 'json' has no attribute"),
        ("json.__name__", "--reward-function json.__name__: not a function; give package.module.function"),
        (f"{__name__}.three", "takes 3 arguments; write reward(sample) or reward(args, sample)"),
    ],
)
def test_a_reward_function_that_cannot_be_used_is_named(path: str, text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Reward.load(path) if "three" not in path else Reward.of(three)
    assert text in raised.value.message


# -- everything at once ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
async def test_every_rollout_is_accounted_for(tmp_path: Path, seed: int) -> None:
    """Failing, slow and cancelling rollouts, a filter, an interrupt in the middle, and going on afterwards."""
    rng = random.Random(seed)
    count, each = 60, 4
    busy: dict[str, Any] = {"sample_timeout": 0.5, "concurrency": 50, "stop_after_failures": None}

    async def generate(given: GenerateFnInput) -> GenerateFnOutput:
        await asyncio.sleep(rng.random() * 0.01)
        chance = rng.random()
        if chance < 0.1:
            raise ValueError("no luck")
        if chance < 0.15:
            raise asyncio.CancelledError
        if chance < 0.2:
            await asyncio.Event().wait()
        return GenerateFnOutput(finish(given.sample, float(rng.random() < 0.5)))

    first = asyncio.Event()

    def noticed(args: Any, samples: Sequence[Sample]) -> bool:
        first.set()
        return rewards_differ(args, samples)

    task = asyncio.create_task(run(tmp_path, generate, count=count, keep_group=noticed, **busy))
    await first.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    failed_before = len(lines(tmp_path / FAILURES))
    over = set(kept(tmp_path)) | {note["prompt_index"] for note in lines(tmp_path / FILTERED)}
    assert 0 < len(over) < count, "the interrupt came in the middle"
    runner = await run(tmp_path, generate, count=count, keep_group=rewards_differ, **busy)
    records = list(read_records(tmp_path))
    keys = {(record["prompt_index"], record["sample_index"]) for record in records}
    assert len(keys) == len(records)
    left_out = {note["prompt_index"]: note["rollouts"] for note in lines(tmp_path / FILTERED)}
    assert not left_out.keys() & {prompt for prompt, _ in keys}
    failed = lines(tmp_path / FAILURES)[failed_before:]
    new_kept = sum(prompt not in over for prompt, _ in keys)
    new_left_out = sum(rollouts for prompt, rollouts in left_out.items() if prompt not in over)
    assert new_kept + new_left_out + len(failed) == (count - len(over)) * each
    assert (runner.tally.aborted, runner.tally.running, runner.tally.failures) == (0, 0, len(failed))
