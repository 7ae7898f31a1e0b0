"""What answers at an engine's URL."""

from __future__ import annotations

from aiohttp import web

from helpers.fake_engine import fake_engine
from helpers.stripping_router import served, stripping_router
from miles_core.engine.client import EngineClient
from miles_core.engine.identify import Identity, identify

DROPS = "which drops input_ids, return_meta_info and rid of chat requests; give --engine the workers' own URLs"


async def identity(url: str) -> Identity | None:
    client = EngineClient()
    try:
        return await identify(client, url)
    finally:
        await client.close()


def sglang_worker(version: str = "0.5.23") -> web.Application:
    """Answers as SGLang does to what it is asked here."""

    async def chat(request: web.Request) -> web.Response:
        assert (await request.json())["input_ids"] == []
        return web.json_response({"object": "error", "message": "input_ids cannot be empty.", "code": 400}, status=400)

    async def info(request: web.Request) -> web.Response:
        return web.json_response({"model_path": "/model", "version": version})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/model_info", info)
    app.router.add_get("/server_info", info)
    return app


async def test_an_sglang_worker() -> None:
    with served(sglang_worker()) as url:
        assert await identity(url) == Identity("sglang 0.5.23")


async def test_a_router_that_lists_its_workers_is_named_with_them() -> None:
    with stripping_router(("http://10.0.0.1:30000", "http://10.0.0.2:30000")) as url:
        found = await identity(url)
    assert found is not None
    assert found.kind == "sglang-router"
    assert found.router is not None
    assert f"sglang-router in front of http://10.0.0.1:30000, http://10.0.0.2:30000, {DROPS}" in found.router


async def test_a_router_that_tells_nothing_is_known_by_what_it_drops() -> None:
    with stripping_router() as url:
        found = await identity(url)
    assert found is not None
    assert found.router is not None
    assert f"a router, {DROPS}" in found.router


async def test_what_is_neither() -> None:
    with fake_engine() as engine:
        assert await identity(engine.url) == Identity("other")
        assert engine.requests == []
    assert await identity(engine.url) is None
