"""Rollouts as a library: an async iterator of finished samples."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

from miles_core.rollout.data import Prompt, prompts_of
from miles_core.rollout.groups import KeepGroup
from miles_core.rollout.job import RunOptions
from miles_core.rollout.loader import load_generate_function
from miles_core.rollout.output import RunDirectory
from miles_core.rollout.rewards import Reward
from miles_core.rollout.runner import RolloutRunner
from miles_core.rollout.state import RolloutState
from miles_core.types import Sample


async def rollouts(
    prompts: Iterable[Prompt | dict[str, Any]],
    generate: Any,
    state: RolloutState,
    *,
    options: RunOptions | None = None,
    reward: Reward | None = None,
    keep_group: KeepGroup | None = None,
    directory: RunDirectory | None = None,
) -> AsyncGenerator[Sample, None]:
    """Run every prompt and yield samples as they are finished, those of a rollout (or a kept group) side by side.

    `prompts` are objects as the prompts file has them; `generate` is anything that `load_generate_function` takes.
    `state` says where the session server or the engines are. A failing rollout yields nothing; it is logged, and
    noted in `directory` where there is one. Not reading on slows the run down; closing the iterator
    (`contextlib.aclosing`) aborts what is under way.
    """
    given = list(prompts)
    ready: list[Prompt] = [each for each in given if isinstance(each, Prompt)]
    if len(ready) != len(given):
        ready = prompts_of(each for each in given if not isinstance(each, Prompt))
    chosen = options or RunOptions()
    queue: asyncio.Queue[list[Sample]] = asyncio.Queue(maxsize=chosen.concurrency)
    runner = RolloutRunner(
        state,
        load_generate_function(generate),
        directory,
        chosen,
        reward=reward,
        keep_group=keep_group,
        deliver=queue.put,
    )
    work = asyncio.create_task(runner.run(runner.jobs(ready)))
    try:
        async with aclosing(_until_over(queue, work)) as batches:
            async for samples in batches:
                for sample in samples:
                    yield sample
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    work.result()


async def _until_over(
    queue: asyncio.Queue[list[Sample]], work: asyncio.Task[None]
) -> AsyncGenerator[list[Sample], None]:
    """What comes through the queue, until the work is over and the queue is empty."""
    while not (work.done() and queue.empty()):
        got = asyncio.create_task(queue.get())
        try:
            await asyncio.wait({got, work}, return_when=asyncio.FIRST_COMPLETED)
            if got.done():
                yield got.result()
        finally:
            got.cancel()
