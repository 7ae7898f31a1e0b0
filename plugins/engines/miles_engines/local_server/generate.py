"""`/generate`: prompts in, text and ids out, whole or as a stream of what there is so far."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from miles_engines.local_server import params, replies
from miles_engines.local_server.job import Finish, Job
from miles_engines.local_server.protocol import ApiError, GenerateBody, GenerateParams, constrained
from miles_engines.local_server.service import Service


@dataclass(frozen=True)
class Generation:
    """A checked generate request and its jobs."""

    body: GenerateBody
    jobs: Sequence[Job]
    single: bool


def open_generation(service: Service, body: GenerateBody) -> Generation:
    """Check a request and make its jobs; ApiError says what is wrong."""
    prompts, single = _prompts(service, body)
    sampling = _per_prompt(body, len(prompts))
    copies = {item.n or 1 for item in sampling}
    if len(copies) > 1:
        raise ApiError("The parallel_sample_num should be the same for all samples in sample params.")
    each = copies.pop()
    rids = service.rids(body.rid, len(prompts) * each)
    jobs = [
        _job(service, body, rids[place * each + copy], prompt, item, copy)
        for place, (prompt, item) in enumerate(zip(prompts, sampling, strict=True))
        for copy in range(each)
    ]
    return Generation(body, jobs, single and each == 1)


def _job(service: Service, body: GenerateBody, rid: str, prompt: list[int], item: GenerateParams, copy: int) -> Job:
    constrained(regex=item.regex, ebnf=item.ebnf, json_schema=item.json_schema)
    room = service.room(prompt, params.generate_limit(item))
    top = (body.top_logprobs_num or 0) if body.return_logprob else 0
    sampling = params.choice(params.for_generate(item, room, top), copy)
    return service.job(rid, prompt, sampling, live=bool(body.stream))


def _prompts(service: Service, body: GenerateBody) -> tuple[list[list[int]], bool]:
    """The prompts' ids, and whether the request was for one rather than a list."""
    if (body.text is None) == (body.input_ids is None):
        raise ApiError(
            "Either text, input_ids or input_embeds should be provided."
            if body.text is None
            else "text and input_ids cannot be provided at the same time."
        )
    if body.input_ids is not None:
        nested = [item for item in body.input_ids if isinstance(item, list)]
        flat = [item for item in body.input_ids if isinstance(item, int)]
        prompts, single = (nested, False) if nested else ([flat], True)
    else:
        texts = [body.text] if isinstance(body.text, str) else body.text or []
        prompts, single = [service.format.encode(text) for text in texts], isinstance(body.text, str)
    if not prompts or not all(prompts):
        raise ApiError("input_ids cannot be empty." if body.text is None else "text cannot be empty.")
    return prompts, single


def _per_prompt(body: GenerateBody, count: int) -> list[GenerateParams]:
    if not isinstance(body.sampling_params, list):
        return [body.sampling_params or GenerateParams()] * count
    if len(body.sampling_params) != count:
        raise ApiError(f"sampling_params has {len(body.sampling_params)} entries for {count} prompts.")
    return body.sampling_params


async def answer(service: Service, generation: Generation) -> Any:
    """Run the request to its end: an object, or a list of them for a list of prompts."""
    async with service.running(generation.jobs):
        finishes = await asyncio.gather(*(job.result() for job in generation.jobs))
    for finish in finishes:
        replies.raise_failed(finish)
    out = [_state(service, generation, job, len(job.output_ids), job.finish) for job in generation.jobs]
    return out[0] if generation.single else out


async def events(service: Service, generation: Generation) -> AsyncIterator[dict[str, Any]]:
    """The state after each step, up to `[DONE]`; of several prompts one after the other, with their index."""
    for index, job in enumerate(generation.jobs):
        finish: Finish | None = None
        while finish is None:
            count, finish = await job.wait()
            if finish is not None:
                replies.raise_failed(finish)
            state = _state(service, generation, job, count, finish)
            yield state if generation.single else state | {"index": index}


def _state(service: Service, generation: Generation, job: Job, count: int, finish: Finish | None) -> dict[str, Any]:
    format_ = service.format
    shown = replies.shown_ids(job) if finish is not None else job.output_ids[:count]
    text = format_.decode(format_.visible(shown) if job.params.skip_special_tokens else shown)
    meta = replies.meta_info(
        job,
        finish,
        count,
        service.scheduler.weight_version,
        logprobs=bool(generation.body.return_logprob),
        text=format_.token_text if generation.body.return_text_in_logprobs else None,
    )
    return {"text": text, "output_ids": job.output_ids[:count], "meta_info": meta}
