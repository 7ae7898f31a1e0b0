"""Rollouts that are stopped keep what they have, and a later run goes on from there."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.chat_tokenizer import IM_END
from helpers.fake_generate import FakeGenerate, reply, says, state_of
from miles_core.errors import ConfigError
from miles_core.rollout import runner as running
from miles_core.rollout.data import Prompt
from miles_core.rollout.job import RunOptions
from miles_core.rollout.loader import load_generate_function
from miles_core.rollout.output import FAILURES, PARTIAL, RunDirectory, read_records
from miles_core.rollout.runner import RolloutRunner
from miles_core.rollout.state import RolloutArgs, RolloutState
from miles_core.types import GenerateFnInput, GenerateFnOutput, Sample, SampleStatus

TOOLS = [{"type": "function", "function": {"name": "wait", "parameters": {"type": "object", "properties": {}}}}]
STUCK = asyncio.Event()


@pytest.fixture
async def engine() -> AsyncIterator[FakeGenerate]:
    async with FakeGenerate().serving() as fake:
        yield fake


def prompts(count: int, **metadata: Any) -> list[Prompt]:
    return [Prompt(at, [{"role": "user", "content": f"{at}"}], None, metadata, f"{at:016x}") for at in range(count)]


async def run(
    path: Path,
    generate: Any,
    state: RolloutState,
    given: Sequence[Prompt],
    *,
    stop: asyncio.Event | None = None,
    **options: Any,
) -> RolloutRunner:
    """A whole run, or one that is cancelled, as Ctrl-C does, when `stop` is set."""
    directory = RunDirectory(path, {})
    try:
        runner = RolloutRunner(state, generate, directory, RunOptions(**{"partial": True, **options}))
        work = asyncio.create_task(runner.run(runner.jobs(given)))
        if stop is not None:
            await stop.wait()
            work.cancel()
        await asyncio.wait([work])
        if stop is None:
            work.result()
        return runner
    finally:
        directory.close()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def test_an_answer_that_is_stopped_goes_on_in_the_next_run(tmp_path: Path, engine: FakeGenerate) -> None:
    engine.hold, engine.on_abort = asyncio.Event(), [11, 12, 13]
    generate = load_generate_function("single_turn")
    state = state_of(engine.url, rollout_max_response_len=20)
    first = await run(tmp_path, generate, state, prompts(1), stop=engine.entered)
    (kept,) = lines(tmp_path / PARTIAL)
    prompt = engine.requests[0]["input_ids"]
    assert kept["tokens"] == [*prompt, 11, 12, 13]
    assert (kept["status"], kept["loss_mask"], kept["response_length"]) == ("aborted", [1, 1, 1], 3)
    assert list(read_records(tmp_path)) == []
    tally = first.tally
    assert (tally.aborted, tally.partial, tally.failures, tally.not_begun) == (1, 1, 0, 0)

    engine.hold = None
    engine.script = [reply([14, IM_END], weight_version="w2")]
    second = await run(tmp_path, generate, state, prompts(1))
    assert engine.requests[1]["input_ids"] == kept["tokens"]
    assert engine.requests[1]["sampling_params"]["max_new_tokens"] == 17
    (record,) = read_records(tmp_path)
    assert record["tokens"] == [*prompt, 11, 12, 13, 14, IM_END]
    assert record["rollout_log_probs"] == [-1 / 64, -2 / 64, -3 / 64, -1 / 64, -2 / 64]
    assert (record["status"], record["weight_versions"]) == ("completed", ["w1", "w2"])
    assert "prompt_hash" in record
    assert not (tmp_path / PARTIAL).exists()
    assert (second.tally.samples, second.tally.aborted, second.tally.partial) == (1, 0, 0)


async def test_a_budget_that_is_used_up_needs_no_request(tmp_path: Path, engine: FakeGenerate) -> None:
    engine.hold, engine.on_abort = asyncio.Event(), [11, 12, 13]
    generate, state = load_generate_function("single_turn"), state_of(engine.url, rollout_max_response_len=3)
    await run(tmp_path, generate, state, prompts(1), stop=engine.entered)
    await run(tmp_path, generate, state, prompts(1))
    (record,) = read_records(tmp_path)
    assert (record["status"], record["response_length"], len(engine.requests)) == ("truncated", 3, 1)


async def test_what_waits_for_its_turn_at_the_engine_is_stopped_too(tmp_path: Path, engine: FakeGenerate) -> None:
    engine.hold, engine.on_abort = asyncio.Event(), [11]
    generate, state = load_generate_function("single_turn"), state_of(engine.url, limit=1)
    first = await run(tmp_path, generate, state, prompts(5), stop=engine.entered, concurrency=3)
    assert len(engine.requests) == 1
    assert (first.tally.aborted, first.tally.partial, first.tally.failures, first.tally.not_begun) == (3, 1, 0, 2)
    engine.hold = None
    second = await run(tmp_path, generate, state, prompts(5), concurrency=3)
    assert (second.tally.samples, len(list(read_records(tmp_path)))) == (5, 5)


async def test_without_the_flag_what_was_kept_stays_where_it_is(tmp_path: Path, engine: FakeGenerate) -> None:
    engine.hold, engine.on_abort = asyncio.Event(), [11]
    generate, state = load_generate_function("single_turn"), state_of(engine.url)
    await run(tmp_path, generate, state, prompts(2), stop=engine.entered, concurrency=1)
    before = (tmp_path / PARTIAL).read_bytes()
    engine.hold = None
    await run(tmp_path, generate, state, prompts(1), partial=False)
    assert (tmp_path / PARTIAL).read_bytes() == before
    assert next(read_records(tmp_path))["response_length"] > 1, "begun anew"
    runner = await run(tmp_path, generate, state, prompts(2))
    assert (runner.tally.samples, lines(tmp_path / PARTIAL)) == (2, [])


async def wait_for_ever(name: str, arguments: dict[str, Any]) -> str:
    """A tool that the run is stopped in."""
    STUCK.set()
    await asyncio.Event().wait()
    return "never"


async def answer_at_once(name: str, arguments: dict[str, Any]) -> str:
    """The same tool, when it works."""
    return "done"


async def test_a_slow_tool_costs_none_of_the_tokens_before_it(
    tmp_path: Path, engine: FakeGenerate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "GRACE", 0.1)
    STUCK.clear()
    flags: dict[str, Any] = {
        "generate_execute_tool_function_path": f"{__name__}.wait_for_ever",
        "generate_tool_specs_path": None,
    }
    generate = load_generate_function("multi_turn")
    engine.script = [says("", ("wait", "{}")), says("Good.")]
    given = prompts(1, tools=TOOLS)
    await run(tmp_path, generate, state_of(engine.url, **flags), given, stop=STUCK)
    (kept,) = lines(tmp_path / PARTIAL)
    assert (kept["status"], sum(kept["loss_mask"]), kept["response_length"]) == (
        "aborted",
        kept["response_length"],
        len(kept["tokens"]) - len(engine.requests[0]["input_ids"]),
    )
    flags["generate_execute_tool_function_path"] = f"{__name__}.answer_at_once"
    await run(tmp_path, generate, state_of(engine.url, **flags), given)
    (record,) = read_records(tmp_path)
    assert record["tokens"][: len(kept["tokens"])] == kept["tokens"]
    assert "<tool_response>\ndone" in record["response"]
    assert record["response"].endswith("Good.<|im_end|>")


def finish(sample: Sample, reward: float = 1.0) -> Sample:
    sample.tokens, sample.response_length = [1, 2, 3], 2
    sample.loss_mask, sample.rollout_log_probs = [1, 0], [-0.5, 0.0]
    sample.status, sample.reward = SampleStatus.COMPLETED, reward
    return sample


async def test_finished_rollouts_of_a_group_that_is_not_over_are_not_done_twice(tmp_path: Path) -> None:
    """Over-sampling stops when one group is there: of the other, three of four were finished."""
    calls: list[int] = []
    last = asyncio.Event()

    async def generate(given: GenerateFnInput) -> GenerateFnOutput:
        index = given.sample.index or 0
        calls.append(index)
        if index == 3:
            await last.wait()
        if index == 7:
            last.set()
            while not given.state.aborted:  # noqa: ASYNC110  # as a generate function has to
                await asyncio.sleep(0.01)
            assert given.sample.response_length == 0
            given.sample.tokens, given.sample.response_length = [1, 2], 1
            given.sample.loss_mask, given.sample.rollout_log_probs = [1], [-0.25]
            given.sample.status = SampleStatus.ABORTED
            return GenerateFnOutput(given.sample)
        return GenerateFnOutput(finish(given.sample))

    def state() -> RolloutState:
        return RolloutState(RolloutArgs())

    options: dict[str, Any] = {"samples_per_prompt": 4, "continuous": True, "concurrency": 8}
    runner = await run(tmp_path, generate, state(), prompts(2), keep_groups=1, **options)
    assert {record["prompt_index"] for record in read_records(tmp_path)} == {0}
    assert (runner.tally.samples, runner.tally.aborted, runner.tally.partial) == (4, 4, 4)
    assert {(each["sample_index"], each["status"]) for each in lines(tmp_path / PARTIAL)} == {
        (0, "completed"),
        (1, "completed"),
        (2, "completed"),
        (3, "aborted"),
    }
    calls.clear()

    async def go_on(given: GenerateFnInput) -> GenerateFnOutput:
        calls.append(given.sample.index or 0)
        assert given.sample.tokens == [1, 2]
        return GenerateFnOutput(finish(given.sample))

    runner = await run(tmp_path, go_on, state(), prompts(2), keep_groups=2, **options)
    assert calls == [7]
    assert (runner.tally.samples, runner.tally.groups_kept, runner.tally.aborted) == (8, 2, 0)
    assert not (tmp_path / PARTIAL).exists()


async def test_a_partial_sample_that_fails_is_begun_anew(tmp_path: Path, engine: FakeGenerate) -> None:
    engine.hold, engine.on_abort = asyncio.Event(), [11]
    generate, state = load_generate_function("single_turn"), state_of(engine.url)
    await run(tmp_path, generate, state, prompts(1), stop=engine.entered)
    engine.hold, engine.script = None, [400]
    await run(tmp_path, generate, state, prompts(1))
    assert "scripted 400" in lines(tmp_path / FAILURES)[0]["error"]
    await run(tmp_path, generate, state, prompts(1))
    assert engine.requests[-1]["input_ids"] == engine.requests[0]["input_ids"]
    assert len(list(read_records(tmp_path))) == 1


async def test_stopping_again_before_its_turn_loses_nothing(tmp_path: Path, engine: FakeGenerate) -> None:
    """What the first run kept is there for the third one, which the second did not get to."""
    engine.hold, engine.on_abort = asyncio.Event(), [11]
    generate, state = load_generate_function("single_turn"), state_of(engine.url)
    started = asyncio.Event()

    async def all_started() -> None:
        while len(engine.requests) < 3:  # noqa: ASYNC110  # the engine only lists them
            await asyncio.sleep(0.005)
        started.set()

    watch = asyncio.create_task(all_started())
    await run(tmp_path, generate, state, prompts(3), stop=started)
    await watch
    assert len(lines(tmp_path / PARTIAL)) == 3
    engine.entered.clear()
    await run(tmp_path, generate, state, prompts(3), stop=engine.entered, concurrency=1)
    assert sorted(each["response_length"] for each in lines(tmp_path / PARTIAL)) == [1, 1, 2]


async def test_agents_begin_anew(tmp_path: Path) -> None:
    """Nothing of the attempt that was stopped stays: neither tokens nor what the session said of it."""
    from helpers.fake_sessions import FakeSessions, serving_in_thread
    from miles_core.rollout.state import FunctionAgent

    async def agent(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any, **more: Any) -> None:
        import aiohttp

        async with aiohttp.ClientSession() as http:
            await http.post(f"{base_url}/v1/chat/completions", json={"messages": prompt})

    stopped = Sample(tokens=[1, 2, 3], response_length=2, loss_mask=[1, 1], rollout_log_probs=[-1.0, -1.0])
    stopped.status, stopped.prompt = SampleStatus.ABORTED, [{"role": "user", "content": "x"}]
    stopped.metadata = {"mine": 1, "aborted": 1, "agent_error": "x"}
    with serving_in_thread(FakeSessions()) as url:
        state = RolloutState(RolloutArgs(session_server_url=url), agent=FunctionAgent(agent))
        output = await load_generate_function("agentic")(GenerateFnInput(state, stopped, {}))
    (sample,) = output.as_list()
    assert sample.status is SampleStatus.COMPLETED
    assert sample.metadata["mine"] == 1
    assert not {"agent_error", "aborted"} & sample.metadata.keys()


async def test_it_needs_a_folder() -> None:
    with pytest.raises(ConfigError, match="--partial-rollout keeps rollouts in the output folder"):
        RolloutRunner(RolloutState(RolloutArgs()), None, None, RunOptions(partial=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(4))
async def test_stopped_anywhere_again_and_again_every_token_stays(
    tmp_path: Path, engine: FakeGenerate, seed: int
) -> None:
    """Each sample's tokens are those that the engine gave, in order, whatever the stops."""
    rng = random.Random(seed)
    given_out: dict[tuple[int, ...], list[int]] = {}

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        ids = [rng.randrange(1, 5000) for _ in range(rng.randrange(1, 4))]
        ended = rng.random() < 0.3
        if ended:
            ids.append(IM_END)
        given_out[tuple(body["input_ids"])] = ids
        return reply(ids, "stop" if ended else "abort")

    generate = load_generate_function("single_turn")
    engine.script = [answer] * 10_000
    for _ in range(60):
        runner = await run(tmp_path, generate, state_of(engine.url), prompts(6), concurrency=rng.randrange(1, 6))
        tally = runner.tally
        assert tally.aborted == tally.partial == len(lines(tmp_path / PARTIAL))
        assert tally.samples + tally.partial == 6
        if tally.samples == 6:
            break
    assert tally.samples == 6
    for record in read_records(tmp_path):
        tokens, start = record["tokens"], len(record["tokens"]) - record["response_length"]
        rebuilt = list(tokens[:start])
        while tuple(rebuilt) in given_out:
            rebuilt += given_out[tuple(rebuilt)]
        assert rebuilt == tokens
        assert len(record["rollout_log_probs"]) == len(record["loss_mask"]) == record["response_length"]
