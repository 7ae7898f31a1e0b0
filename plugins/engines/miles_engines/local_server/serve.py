"""Put the parts together and serve until a signal comes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable

import torch
from aiohttp import web

from miles_engines.local_server import chat_format, model
from miles_engines.local_server.http import build_app
from miles_engines.local_server.prefix_cache import PrefixCache
from miles_engines.local_server.sampling import Sampler
from miles_engines.local_server.scheduler import Scheduler
from miles_engines.local_server.service import Service
from miles_engines.local_server.settings import Settings

CACHE_SHARE = 8
"""Without `--cache-tokens`, the prefix cache may take this fraction (1/8) of the memory."""

RUNNING_SHARE = 3
"""Running sequences may take this fraction (1/3) of the memory; more of them wait."""

Tell = Callable[[str, str], None]


async def serve(settings: Settings, listener: socket.socket, tell: Tell, started: Callable[[], None]) -> None:
    """Load, listen, tell `ready PORT`, then serve until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loading = asyncio.ensure_future(asyncio.to_thread(build_parts, settings, tell))
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        return
    service = assemble(settings, *await loading, loop)
    runner = web.AppRunner(build_app(service), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.SockSite(runner, listener, backlog=1024).start()
    tell("ready", str(listener.getsockname()[1]))
    started()
    await stop.wait()
    service.abort(None, everything=True)
    await runner.cleanup()
    await asyncio.to_thread(service.scheduler.stop)


def build_parts(settings: Settings, tell: Tell) -> tuple[model.Model, chat_format.ChatFormat]:
    """Read the tokenizer, the family and the model; the slow part of starting."""
    format_ = chat_format.load(settings.tito_model, str(settings.checkpoint))
    return model.load(settings, lambda text: tell("progress", text)), format_


def assemble(
    settings: Settings, loaded: model.Model, format_: chat_format.ChatFormat, loop: asyncio.AbstractEventLoop
) -> Service:
    """A service with its scheduler started."""
    memory = memory_bytes(loaded.device)
    limits = {"max_bytes": memory // CACHE_SHARE} if settings.cache_tokens is None else {}
    scheduler = Scheduler(
        loaded,
        Sampler(loaded.device, scaled_logprobs=settings.logprobs == "scaled", seed=settings.seed),
        PrefixCache(max_tokens=settings.cache_tokens, **limits),
        loop,
        stop_ids=frozenset(loaded.eos_ids) | frozenset(format_.stop_ids),
        max_batch=settings.max_batch,
        prefill_chunk=settings.prefill_chunk,
        max_kv_bytes=memory // RUNNING_SHARE,
        weight_version=settings.weight_version,
    )
    scheduler.start()
    return Service(settings, loaded, format_, scheduler)


def memory_bytes(device: torch.device) -> int:
    """The memory of the machine, or of the GPU the model is on; 8 GiB where it cannot be asked."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 8 << 30
