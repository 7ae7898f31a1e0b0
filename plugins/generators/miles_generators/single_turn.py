"""The generate function of one answer: prompt in, one generation out, over `/generate`.

An aborted sample goes on where it stopped, with what is left of `max_new_tokens`. `sample.metadata["tools"]`, where it
is a list, is rendered with the prompt.
"""

from __future__ import annotations

from typing import Any

from miles_core.rollout import generation
from miles_core.types import GenerateFnInput, GenerateFnOutput, Sample, SampleStatus


async def generate(input: GenerateFnInput) -> GenerateFnOutput:
    """Sample one answer; `truncated` without a call where the context or the budget leaves no room."""
    sample = input.sample
    if not generation.is_over(sample):
        generation.begin(input.state, sample, tools_of(sample))
        await _answer(input, sample)
        generation.spell(input.state, sample)
    return GenerateFnOutput(sample)


def tools_of(sample: Sample) -> list[dict[str, Any]] | None:
    """The tools that the sample itself brings."""
    tools = sample.metadata.get("tools")
    return tools if isinstance(tools, list) and tools else None


async def _answer(input: GenerateFnInput, sample: Sample) -> None:
    if getattr(input.state, "aborted", False):
        sample.status = SampleStatus.ABORTED
        return
    params = generation.capped(input.args, len(sample.tokens), input.sampling_params, spent=sample.response_length)
    if params is None:
        sample.status = SampleStatus.TRUNCATED
        return
    prompt = list(sample.tokens)
    async with generation.lane_of(input.state, sample) as lane:
        reply = await generation.ask(input.state, lane, prompt, params)
    if reply is None:
        sample.status = SampleStatus.TRUNCATED
    else:
        generation.append(input.args, sample, prompt, reply)
