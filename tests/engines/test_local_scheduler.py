"""The scheduler on a real, tiny model: every stored log-prob is what the model says of its token."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
import pytest_asyncio
import torch

from helpers.tiny import VOCABULARY
from miles_engines.local_server.job import Job
from miles_engines.local_server.kv import KVRows
from miles_engines.local_server.model import Model, Work
from miles_engines.local_server.prefix_cache import PrefixCache
from miles_engines.local_server.sampling import Sampler, SamplingParams
from miles_engines.local_server.scheduler import Scheduler
from miles_engines.local_server.stops import StopStrings

TOLERANCE = 1e-4
Make = Callable[..., Scheduler]
_numbers = itertools.count()


@pytest_asyncio.fixture
async def make(model: Model) -> AsyncIterator[Make]:
    """Builds schedulers that are stopped when the test ends."""
    built: list[Scheduler] = []

    def build(*, scaled: bool = True, cache: PrefixCache | None = None, **options: Any) -> Scheduler:
        sampler = Sampler(model.device, scaled_logprobs=scaled, seed=0)
        loop = asyncio.get_running_loop()
        scheduler = Scheduler(model, sampler, cache or PrefixCache(), loop, **options)
        scheduler.start()
        built.append(scheduler)
        return scheduler

    yield build
    for scheduler in built:
        scheduler.stop()


def job(prompt: list[int], *, live: bool = False, stops: StopStrings | None = None, **params: Any) -> Job:
    sampling = SamplingParams(**{"max_new_tokens": 12, **params})
    return Job(rid=str(next(_numbers)), prompt=prompt, params=sampling, stops=stops or StopStrings(), live=live)


def prompt(length: int, *, start: int = 0) -> list[int]:
    return [(start + 7 * index * index + 3 * index) % 400 for index in range(length)]


async def run(scheduler: Scheduler, *jobs: Job) -> None:
    for one in jobs:
        scheduler.submit(one)
    async with asyncio.timeout(30):
        await asyncio.gather(*(one.result() for one in jobs))


def check(model: Model, one: Job, *, scaled: bool = True) -> None:
    """Run the plain model over all tokens and compare."""
    tokens = one.prompt + one.output_ids
    with torch.inference_mode():
        logits = model._network(input_ids=torch.tensor([tokens])).logits[0].float()
    divisor = one.params.divisor if scaled else 1.0
    expected = torch.log_softmax(logits / divisor, -1)
    for index, (token, logprob) in enumerate(zip(one.output_ids, one.logprobs, strict=True)):
        at = len(one.prompt) + index - 1
        assert logprob == pytest.approx(float(expected[at, token]), abs=TOLERANCE)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.9])
async def test_logprobs_of_one_sequence(make: Make, model: Model, temperature: float) -> None:
    one = job(prompt(20), temperature=temperature)
    await run(make(), one)
    assert one.finish == {"type": "length", "length": 12}
    assert len(one.output_ids) == 12
    check(model, one)


@pytest.mark.parametrize("temperature", [0.6, 1.9])
async def test_unscaled_logprobs(make: Make, model: Model, temperature: float) -> None:
    one = job(prompt(20), temperature=temperature)
    await run(make(scaled=False), one)
    check(model, one, scaled=False)


async def test_logprobs_in_a_batch_of_different_lengths_joining_and_leaving(make: Make, model: Model) -> None:
    scheduler = make(max_batch=5, prefill_chunk=32)
    jobs = [
        job(prompt(3 + 9 * index, start=index), temperature=0.5 + 0.2 * index, max_new_tokens=2 + 5 * index % 23)
        for index in range(14)
    ]
    await run(scheduler, *jobs)
    for one in jobs:
        assert len(one.output_ids) == one.params.max_new_tokens
        check(model, one)


async def test_logprobs_behind_cached_prefixes(make: Make, model: Model) -> None:
    scheduler = make()
    first = job(prompt(40), temperature=1.3)
    await run(scheduler, first)
    assert first.cached_tokens == 0
    tokens = first.prompt + first.output_ids
    again = job(list(first.prompt), temperature=0.8)
    longer = job(tokens + prompt(10, start=5), temperature=0.7)
    branch = job(tokens[:45] + prompt(9, start=2), temperature=1.1)
    await run(scheduler, again, longer, branch)
    assert again.cached_tokens == 39
    assert longer.cached_tokens == len(tokens) - 1
    assert branch.cached_tokens == 45
    for one in (again, longer, branch):
        check(model, one)


async def test_prompts_that_come_together_share_their_beginning(make: Make, model: Model) -> None:
    jobs = [job(prompt(100), temperature=1.0) for _ in range(4)]
    await run(make(), *jobs)
    assert sorted(one.cached_tokens for one in jobs) == [0, 99, 99, 99]
    for one in jobs:
        check(model, one)


async def test_no_cache(make: Make, model: Model) -> None:
    scheduler = make(cache=PrefixCache(max_tokens=0))
    jobs = [job(prompt(100)) for _ in range(2)]
    await run(scheduler, *jobs)
    await run(scheduler, third := job(prompt(100)))
    assert [one.cached_tokens for one in (*jobs, third)] == [0, 0, 0]
    check(model, third)


async def test_a_small_cache_evicts_and_stays_right(make: Make, model: Model) -> None:
    cache = PrefixCache(max_tokens=150)
    scheduler = make(cache=cache)
    for start in (0, 1, 2, 0, 1):
        one = job(prompt(60, start=start))
        await run(scheduler, one)
        check(model, one)
    assert cache.tokens <= 150


async def test_flush_empties_the_cache(make: Make) -> None:
    scheduler = make()
    await run(scheduler, job(prompt(30)))
    assert await asyncio.wrap_future(scheduler.flush())
    await run(scheduler, one := job(prompt(30)))
    assert one.cached_tokens == 0


async def test_a_long_prompt_is_read_in_parts_while_others_decode(make: Make, model: Model) -> None:
    scheduler = make(prefill_chunk=16)
    short = job(prompt(5), live=True, max_new_tokens=60)
    scheduler.submit(short)
    await short.wait()
    long = job(prompt(200), max_new_tokens=3)
    await run(scheduler, long)
    await short.result()
    check(model, long)
    check(model, short)


async def test_seeds_repeat_whatever_else_runs(make: Make) -> None:
    alone = job(prompt(25), seed=11, max_new_tokens=30)
    await run(make(), alone)
    crowded = job(prompt(25), seed=11, max_new_tokens=30)
    other = job(prompt(25), seed=12, max_new_tokens=30)
    await run(make(), *(job(prompt(9 + index)) for index in range(8)), crowded, other)
    assert alone.output_ids == crowded.output_ids != other.output_ids


async def test_a_seeded_sequence_that_is_gone_on_with_draws_as_if_never_stopped(make: Make) -> None:
    whole = job(prompt(25), seed=11, max_new_tokens=30)
    await run(make(), whole)
    rest = job([*prompt(25), *whole.output_ids[:12]], seed=11, max_new_tokens=18)
    await run(make(), rest)
    assert [*whole.output_ids[:12], *rest.output_ids] == whole.output_ids


async def test_stop_tokens_end_a_sequence_and_are_kept(make: Make, model: Model) -> None:
    scheduler = make(stop_ids=frozenset(range(0, VOCABULARY, 2)))
    plain, patient, deaf = (
        job(prompt(10), seed=1, max_new_tokens=40),
        job(prompt(10), seed=1, max_new_tokens=40, min_new_tokens=9),
        job(prompt(10), seed=1, max_new_tokens=40, ignore_eos=True),
    )
    own = job(prompt(10), max_new_tokens=40, stop_token_ids=frozenset(range(1, VOCABULARY, 2)))
    await run(scheduler, plain, patient, deaf, own)
    assert plain.finish == {"type": "stop", "matched": plain.output_ids[-1]}
    assert plain.output_ids[-1] % 2 == 0
    assert all(token % 2 for token in plain.output_ids[:-1])
    assert len(patient.output_ids) > 9
    assert all(token % 2 for token in patient.output_ids[:9])
    assert len(deaf.output_ids) == 40
    assert len(own.output_ids) == 1
    for one in (plain, patient, deaf, own):
        check(model, one)


async def test_a_stop_string_ends_a_sequence(make: Make) -> None:
    stops = StopStrings(("3",), lambda ids: "".join(str(token % 10) for token in ids), lambda text: [])
    one = job(prompt(10), stops=stops, max_new_tokens=200, seed=5)
    await run(make(), one)
    assert one.finish == {"type": "stop", "matched": "3"}
    assert [token % 10 == 3 for token in one.output_ids] == [False] * (len(one.output_ids) - 1) + [True]


async def test_a_running_job_is_aborted_with_what_it_has(make: Make, model: Model) -> None:
    scheduler = make()
    one = job(prompt(10), live=True, max_new_tokens=480)
    other = job(prompt(12), max_new_tokens=20)
    scheduler.submit(one)
    scheduler.submit(other)
    await one.wait()
    scheduler.abort(lambda candidate: candidate is one)
    async with asyncio.timeout(10):
        finish = await one.result()
        await other.result()
    assert finish == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert 1 <= len(one.output_ids) < 480
    assert len(other.output_ids) == 20
    check(model, one)
    assert scheduler.load().running == 0


async def test_a_waiting_job_is_aborted_without_having_started(make: Make) -> None:
    scheduler = make(max_batch=1)
    first, second = job(prompt(10), live=True, max_new_tokens=400), job(prompt(10))
    scheduler.submit(first)
    scheduler.submit(second)
    await first.wait()
    scheduler.abort(lambda candidate: True)
    async with asyncio.timeout(10):
        await first.result()
        assert await second.result() == {"type": "abort", "message": "Abort in waiting queue"}
    assert not second.started


async def test_no_token_asked_for(make: Make) -> None:
    one = job(prompt(10), max_new_tokens=0)
    await run(make(), one)
    assert one.finish == {"type": "length", "length": 0}


async def test_top_logprobs(make: Make) -> None:
    one, plain = job(prompt(10), top_logprobs=3, temperature=0.0), job(prompt(11))
    await run(make(), one, plain)
    assert [len(top) for top in one.tops] == [3] * 12
    assert [top[0] for top in one.tops] == list(zip(one.logprobs, one.output_ids, strict=True))
    assert plain.tops == []


async def test_a_weight_version_that_changes_splits_the_tokens(make: Make) -> None:
    scheduler = make(weight_version="a")
    one = job(prompt(10), live=True, max_new_tokens=450)
    scheduler.submit(one)
    await one.wait()

    def rename() -> None:
        scheduler.weight_version = "b"

    await asyncio.wrap_future(scheduler.call(rename))
    await one.result()
    assert [name for name, _ in one.versions] == ["a", "b"]
    assert 0 < one.versions[1][1] < 450


async def test_a_failing_step_fails_its_jobs_and_no_others(
    make: Make, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = make()
    with monkeypatch.context() as patch:
        patch.setattr(Model, "step", _broken_step)
        await run(scheduler, broken := job(prompt(10)))
    assert broken.finish is not None
    assert broken.finish["status_code"] == 500
    assert broken.finish["message"] == "the local engine failed: RuntimeError: out of memory"
    await run(scheduler, one := job(prompt(10)))
    check(model, one)


def _broken_step(*_: object) -> torch.Tensor:
    raise RuntimeError("out of memory")


async def test_stop_ids_that_the_model_lacks_do_no_harm(make: Make, model: Model) -> None:
    odd = frozenset({VOCABULARY + 5, -1})
    one = job(prompt(10), min_new_tokens=4, stop_token_ids=odd)
    await run(make(stop_ids=odd), one, job(prompt(12)))
    assert one.finish == {"type": "length", "length": 12}
    check(model, one)


async def test_sequences_that_do_not_fit_in_memory_wait(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    step = Model.step

    def counted(self: Model, kv: KVRows, work: Sequence[Work]) -> torch.Tensor:
        sizes.append(len(work))
        return step(self, kv, work)

    monkeypatch.setattr(Model, "step", counted)
    token_bytes = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, dim, float32
    jobs = [job(prompt(20 + index)) for index in range(6)]
    scheduler = make(max_kv_bytes=2 * 300 * token_bytes)
    await run(scheduler, job(prompt(5), max_new_tokens=1))  # tells how much a token takes
    await run(scheduler, *jobs)
    assert max(sizes) == 2
    assert all(len(one.output_ids) == 12 for one in jobs)
