"""Parts of answers that chat and generate share, key for key as SGLang writes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from miles_engines.local_server.job import Finish, Job
from miles_engines.local_server.protocol import ApiError

TokenText = Callable[[int], str]


def raise_failed(finish: Finish) -> None:
    """A generation that the engine itself failed is an HTTP error, unlike an aborted one."""
    if finish.get("status_code"):
        raise ApiError(finish["message"], status=finish["status_code"], kind=finish["err_type"])


def shown_ids(job: Job) -> list[int]:
    """The sampled ids without the stop token or string that ended them."""
    matched = job.finish.get("matched") if job.finish else None
    if job.params.no_stop_trim or matched is None:
        return list(job.output_ids)
    if isinstance(matched, str):
        return job.stops.cut(job.output_ids, matched)
    return job.output_ids[:-1] if job.output_ids and job.output_ids[-1] == matched else list(job.output_ids)


def meta_info(
    job: Job,
    finish: Finish | None,
    count: int,
    version: str,
    *,
    logprobs: bool,
    text: TokenText | None,
    reasoning: int = 0,
) -> dict[str, Any]:
    """SGLang's `meta_info` after `count` tokens; `text` spells tokens, None leaves their place null."""
    if finish is not None and not job.started and finish["type"] == "abort":
        return _queued_meta(job, finish, version, logprobs)
    meta: dict[str, Any] = {
        "id": job.rid,
        "finish_reason": finish,
        "prompt_tokens": len(job.prompt),
        "weight_version": job.versions[-1][0] if job.versions else version,
        "num_retractions": job.retractions,
    }
    if logprobs:
        meta |= {"input_token_logprobs": [], **_output_logprobs(job, count, text)}
    meta |= {"reasoning_tokens": reasoning, "completion_tokens": count, "cached_tokens": job.cached_tokens}
    if finish is not None:
        meta["weight_versions"] = version_segments(job, version)
    meta["cached_tokens_details"] = cached_details(job)
    meta["dp_rank"] = None
    if finish is not None:
        meta |= {"e2e_latency": job.latency, "response_sent_to_client_ts": time.time()}
    return meta


def _queued_meta(job: Job, finish: Finish, version: str, logprobs: bool) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "id": job.rid,
        "finish_reason": finish,
        "weight_version": version,
        "e2e_latency": job.latency,
        "weight_versions": version_segments(job, version),
    }
    if logprobs:
        meta |= {"input_token_logprobs": [], "output_token_logprobs": [], "output_token_logprobs_length": 0}
    return meta | {"completion_tokens": 0, "response_sent_to_client_ts": time.time()}


def _output_logprobs(job: Job, count: int, text: TokenText | None) -> dict[str, Any]:
    def spelled(token: int) -> str | None:
        return text(token) if text else None

    pairs = zip(job.logprobs[:count], job.output_ids[:count], strict=True)
    out: dict[str, Any] = {
        "output_token_logprobs": [[logprob, token, spelled(token)] for logprob, token in pairs],
        "output_token_logprobs_length": count,
    }
    if job.params.top_logprobs:
        out["input_top_logprobs"] = []
        out["output_top_logprobs"] = [[[lp, token, spelled(token)] for lp, token in top] for top in job.tops[:count]]
    return out


def cached_details(job: Job) -> dict[str, int] | None:
    """Where the cached part of the prompt was found."""
    return {"device": job.cached_tokens, "host": 0} if job.cached_tokens else None


def version_segments(job: Job, version: str) -> list[dict[str, Any]]:
    """Which weights sampled which tokens."""
    versions = job.versions or [(version, 0)]
    ends = [start for _, start in versions[1:]] + [len(job.output_ids)]
    return [{"version": name, "start": start, "end": end} for (name, start), end in zip(versions, ends, strict=True)]


def openai_logprobs(job: Job, start: int, stop: int, text: TokenText) -> dict[str, Any]:
    """The `logprobs` of sampled tokens `start … stop-1` in OpenAI's form."""
    return {"content": [_openai_token(job, index, text) for index in range(start, stop)]}


def _openai_token(job: Job, index: int, text: TokenText) -> dict[str, Any]:
    tops = job.tops[index] if job.params.top_logprobs else []
    entry = _spelled(text(job.output_ids[index]), job.logprobs[index])
    return entry | {"top_logprobs": [_spelled(text(token), logprob) for logprob, token in tops]}


def _spelled(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "bytes": list(text.encode("utf-8", "replace")), "logprob": logprob}


def usage(jobs: Sequence[Job], reasoning: int) -> dict[str, Any]:
    """Token counts over the choices of one request; the prompt counts once."""
    prompt = len(jobs[0].prompt) if jobs[0].started else 0
    completion = sum(len(job.output_ids) for job in jobs)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": None,
        "reasoning_tokens": reasoning,
        "completion_tokens_details": {"reasoning_tokens": reasoning} if reasoning else None,
    }
