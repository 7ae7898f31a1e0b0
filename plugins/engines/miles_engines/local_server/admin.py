"""What an engine answers beside generating: health, facts, tokenizing, aborting, the cache, pauses, new weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from miles_engines.local_server.model import read_weights
from miles_engines.local_server.protocol import (
    AbortBody,
    ApiError,
    DetokenizeBody,
    PauseBody,
    TokenizeBody,
    UpdateBody,
    UpdateFailed,
    VersionBody,
    read,
)
from miles_engines.local_server.sampling import SamplingParams
from miles_engines.local_server.service import Service
from miles_engines.local_server.settings import ServingError

Action = Callable[[Service, bytes], Awaitable[Any]]
"""Takes the raw body; a string is answered as text, anything else as JSON."""

FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)


async def health(service: Service, raw: bytes) -> str:
    """It serves; nothing is generated."""
    return ""


async def health_generate(service: Service, raw: bytes) -> str:
    """It serves and can generate a token."""
    prompt = [(service.format.stop_ids or (0,))[0]]
    (rid,) = service.rids(None, 1)
    job = service.job(f"HEALTH_CHECK_{rid}", prompt, SamplingParams(max_new_tokens=1, temperature=0.0), live=False)
    async with service.running([job]):
        finish = await job.result()
    if finish["type"] == "abort":
        raise ApiError(finish["message"], status=503)
    return ""


async def model_info(service: Service, raw: bytes) -> dict[str, Any]:
    """What is served, under SGLang's keys."""
    return {
        "model_path": str(service.model.path),
        "served_model_name": service.model_name,
        "tokenizer_path": str(service.settings.checkpoint),
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": service.scheduler.weight_version,
        "load_format": "auto",
        "reasoning_parser": service.format.reasoning_parser,
        "tool_call_parser": service.format.tool_call_parser,
        "disaggregation_mode": "null",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": service.model.model_type,
        "architectures": service.model.architectures,
    }


async def server_info(service: Service, raw: bytes) -> dict[str, Any]:
    """The settings, and how busy the server is."""
    settings = {key: value for key, value in asdict(service.settings).items() if key != "status_fd"}
    paths = {"model_path": str(service.model.path), "tokenizer_path": str(service.settings.checkpoint)}
    settings |= {"model": paths["model_path"], "checkpoint": paths["tokenizer_path"]}
    context = {"context_length": service.model.context_length, "device": str(service.model.device)}
    return {**settings, **paths, **context, **asdict(service.scheduler.load()), "engine": "local"}


async def models(service: Service, raw: bytes) -> dict[str, Any]:
    """OpenAI's list of models: this one."""
    card = {
        "id": service.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "miles-plugins",
        "root": service.model_name,
        "parent": None,
        "max_model_len": service.model.context_length,
    }
    return {"object": "list", "data": [card]}


async def tokenize(service: Service, raw: bytes) -> dict[str, Any]:
    """Text to ids."""
    prompt = read(TokenizeBody, raw).prompt
    length = {"max_model_len": service.model.context_length}
    if isinstance(prompt, str):
        tokens = service.format.encode(prompt)
        return {"tokens": tokens, "count": len(tokens), **length}
    lists = [service.format.encode(text) for text in prompt]
    return {"tokens": lists, "count": [len(tokens) for tokens in lists], **length}


async def detokenize(service: Service, raw: bytes) -> dict[str, Any]:
    """Ids to text."""
    body = read(DetokenizeBody, raw)

    def text(ids: list[int]) -> str:
        return service.format.decode(service.format.visible(ids) if body.skip_special_tokens is not False else ids)

    nested = [item for item in body.tokens if isinstance(item, list)]
    if nested:
        return {"text": [text(ids) for ids in nested]}
    return {"text": text([item for item in body.tokens if isinstance(item, int)])}


async def abort_request(service: Service, raw: bytes) -> str:
    """End requests by rid, or all; what they have sampled is answered."""
    body = read(AbortBody, raw)
    service.abort(body.rid, bool(body.abort_all))
    return ""


async def flush_cache(service: Service, raw: bytes) -> str:
    """Empty the prefix cache, unless requests run."""
    if not await asyncio.wrap_future(service.scheduler.flush()):
        raise ApiError("Cache not flushed: there are running or waiting requests.")
    return FLUSHED


async def update_weight_version(service: Service, raw: bytes) -> dict[str, Any]:
    """Give the weights another name; tokens sampled from now on carry it."""
    body = read(VersionBody, raw)
    if body.abort_all_requests:
        service.abort(None, True)

    def rename() -> None:
        service.scheduler.weight_version = body.new_version

    await asyncio.wrap_future(service.scheduler.call(rename))
    text = f"Weight version updated to {body.new_version}"
    return {"success": True, "message": text, "new_version": body.new_version}


async def pause_generation(service: Service, raw: bytes) -> dict[str, Any]:
    """Take no more steps, until `/continue_generation`; requests are still taken."""
    await asyncio.wrap_future(service.scheduler.pause(read(PauseBody, raw).mode))
    return {"message": "Generation paused successfully.", "status": "ok"}


async def continue_generation(service: Service, raw: bytes) -> dict[str, Any]:
    """Go on after `/pause_generation`."""
    await asyncio.wrap_future(service.scheduler.resume())
    return {"message": "Generation continued successfully.", "status": "ok"}


async def update_weights_from_disk(service: Service, raw: bytes) -> dict[str, Any]:
    """Other weights of the same architecture, from a directory; tokens sampled from now on are theirs."""
    body = read(UpdateBody, raw)
    flush = body.flush_cache is not False
    try:
        weights = await asyncio.to_thread(read_weights, service.settings, Path(body.model_path))
        if body.abort_all_requests:
            service.abort(None, True)
        updated = service.scheduler.update(weights, version=body.weight_version, flush=flush)
        await asyncio.wrap_future(updated)
    except (ServingError, RuntimeError) as error:
        raise UpdateFailed(f"Failed to update weights: {error}.") from error
    renamed = f" Weight version updated to {body.weight_version}." if body.weight_version is not None else ""
    return {"success": True, "message": f"Succeeded to update model weights.{renamed}", "num_paused_requests": 0}


ROUTES: tuple[tuple[str, str, Action], ...] = (
    ("GET", "/health", health),
    ("GET", "/health_generate", health_generate),
    ("GET", "/model_info", model_info),
    ("GET", "/get_model_info", model_info),
    ("GET", "/server_info", server_info),
    ("GET", "/get_server_info", server_info),
    ("GET", "/v1/models", models),
    ("POST", "/tokenize", tokenize),
    ("POST", "/v1/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
    ("POST", "/v1/detokenize", detokenize),
    ("POST", "/abort_request", abort_request),
    ("GET", "/flush_cache", flush_cache),
    ("POST", "/flush_cache", flush_cache),
    ("POST", "/update_weight_version", update_weight_version),
    ("POST", "/update_weights_from_disk", update_weights_from_disk),
    ("POST", "/pause_generation", pause_generation),
    ("POST", "/continue_generation", continue_generation),
)
