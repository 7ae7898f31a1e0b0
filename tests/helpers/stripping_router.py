"""A router that renders chat requests itself and drops the fields it does not know, as sglang-router does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from helpers.fake_engine import says
from miles_core.testing.fake_engine import SETTLING

KNOWN = ("messages", "tools", "max_tokens", "temperature", "logprobs", "stream", "model")


@contextmanager
def stripping_router(workers: tuple[str, ...] | None = None) -> Iterator[str]:
    """Its URL. With `workers` it lists them, as sglang-router; without, nothing but its answers tells it apart."""

    async def chat(request: web.Request) -> web.Response:
        body = {key: value for key, value in (await request.json()).items() if key in KNOWN}
        reply = says("I saw " + ",".join(sorted(body))).json
        del reply["choices"][0]["meta_info"]
        return web.json_response(reply)

    async def listed(request: web.Request) -> web.Response:
        if workers is None:
            raise web.HTTPNotFound
        return web.json_response({"workers": [{"url": url, "is_healthy": True} for url in workers], "total": 1})

    async def model_info(request: web.Request) -> web.Response:
        return web.json_response({"model_path": "/model", "weight_version": "default"})

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/workers", listed)
    app.router.add_get("/model_info", model_info)
    app.router.add_get("/health", health)
    with served(app) as url:
        yield url


@contextmanager
def served(app: web.Application) -> Iterator[str]:
    """An application at a free port, in a thread."""
    loop, started, url = asyncio.new_event_loop(), threading.Event(), []
    stop = asyncio.Event()

    async def main() -> None:
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        started.set()
        await stop.wait()
        await site.stop()
        for _ in range(SETTLING):
            await asyncio.sleep(0)
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield url[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
