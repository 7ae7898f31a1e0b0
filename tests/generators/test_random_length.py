"""Answers of random length."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.fake_generate import FakeGenerate, reply, state_of
from miles_core.errors import ConfigError
from miles_core.types import GenerateFnInput, Sample, SampleStatus
from miles_generators.random_length import generate


async def run(engine: FakeGenerate, sample: Sample, low: int = 3, high: int = 40, **params: Any) -> Sample:
    state = state_of(engine.url, generate_min_length=low, generate_max_length=high)
    return (await generate(GenerateFnInput(state, sample, params))).as_list()[0]


def sampled(body: dict[str, Any]) -> dict[str, Any]:
    return reply([5] * body["sampling_params"]["max_new_tokens"], "length")


async def test_exactly_the_drawn_length(engine: FakeGenerate) -> None:
    lengths = set()
    for index in range(30):
        engine.script = [sampled]
        sample = await run(engine, Sample(index=index, prompt="x"), sampling_seed=7, max_new_tokens=1)
        sent = engine.requests[-1]["sampling_params"]
        assert sample.response_length == sent["max_new_tokens"] == sample.metadata["random_length"]
        assert (sent["ignore_eos"], "stop_token_ids" in sent) == (True, False)
        lengths.add(sample.response_length)
    assert lengths <= set(range(3, 41))
    assert len(lengths) > 5


async def test_a_seed_repeats_the_lengths(engine: FakeGenerate) -> None:
    def lengths() -> list[int]:
        return [each["sampling_params"]["max_new_tokens"] for each in engine.requests]

    for _ in range(2):
        for index in range(4):
            await run(engine, Sample(index=index, prompt="x"), sampling_seed=7)
    assert lengths()[:4] == lengths()[4:]


async def test_a_sample_that_goes_on_keeps_its_length(engine: FakeGenerate) -> None:
    engine.script = [reply([5, 5], "abort"), sampled]
    sample = await run(engine, Sample(index=1, prompt="x"), low=20)
    assert sample.status is SampleStatus.ABORTED
    sample = await run(engine, sample, low=20)
    assert sample.response_length == sample.metadata["random_length"]


@pytest.mark.parametrize(("low", "high"), [(0, 5), (5, 4)])
async def test_a_range_without_lengths_is_refused(engine: FakeGenerate, low: int, high: int) -> None:
    with pytest.raises(ConfigError, match=f"--generate-min-length {low} --generate-max-length {high}"):
        await run(engine, Sample(prompt="x"), low=low, high=high)
