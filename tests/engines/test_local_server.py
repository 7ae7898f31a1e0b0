"""The served engine, from outside: crowds, clients that leave, a process that dies and one that comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import torch

from miles_core.engine.base import EngineConfig
from miles_engines.local import LocalEngine, launch_engine
from miles_engines.local_server.model import Model

USER = [{"role": "user", "content": "hi"}]


@pytest_asyncio.fixture
async def http(engine: LocalEngine) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=50)
    async with aiohttp.ClientSession(engine.urls[0], connector=connector, timeout=timeout) as session:
        yield session


async def chat(http: aiohttp.ClientSession, ids: list[int], **fields: Any) -> dict[str, Any]:
    body = {"model": "x", "messages": USER, "input_ids": ids, "logprobs": True, "return_meta_info": True, **fields}
    async with http.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        reply: dict[str, Any] = await response.json()
        return reply


async def running(http: aiohttp.ClientSession) -> int:
    async with http.get("/server_info") as response:
        info = await response.json()
    return int(info["running"]) + int(info["waiting"])


async def until(condition: Callable[[], Any], seconds: float = 20) -> None:
    """Poll without sleeping in between more than a turn of the loop."""
    async with asyncio.timeout(seconds):
        while True:
            value = condition()
            if await value if asyncio.iscoroutine(value) else value:
                return
            await asyncio.sleep(0.01)


def check(model: Model, prompt: list[int], triples: list[list[Any]], temperature: float) -> None:
    """Every log-prob of an answer is what the plain model says."""
    tokens = prompt + [token for _, token, _ in triples]
    with torch.inference_mode():
        logits = model._network(input_ids=torch.tensor([tokens])).logits[0]
    expected = torch.log_softmax(logits / temperature, -1)
    for index, (logprob, token, _) in enumerate(triples, len(prompt) - 1):
        assert logprob == pytest.approx(float(expected[index, token]), abs=1e-4)


async def session(http: aiohttp.ClientSession, model: Model, number: int, *, turns: int = 3) -> int:
    """Several turns, each on top of the one before; returns the cached tokens."""
    ids, cached = [(number // 4 * 5 + index) % 400 for index in range(30)], 0
    temperature = (0.7, 1.0, 1.6)[number % 3]
    for turn in range(turns):
        reply = await chat(http, ids, max_tokens=10 + number % 7, temperature=temperature)
        meta = reply["choices"][0]["meta_info"]
        triples = meta["output_token_logprobs"]
        assert meta["completion_tokens"] == len(triples) == reply["usage"]["completion_tokens"]
        if number % 10 == 0:
            check(model, ids, triples, temperature)
        assert turn == 0 or meta["cached_tokens"] >= len(ids) - 8
        cached += meta["cached_tokens"]
        ids += [token for _, token, _ in triples] + [(number + index) % 400 for index in range(7)]
    return cached


async def leave(http: aiohttp.ClientSession, number: int) -> None:
    """Ask for a long answer and hang up in the middle of it."""
    body = {"messages": USER, "input_ids": [number, 7], "max_tokens": 480, "ignore_eos": True, "stream": True}
    async with http.post("/v1/chat/completions", json=body) as response:
        for _ in range(3):
            await response.content.readline()
        response.close()


async def test_two_hundred_sessions_while_others_hang_up(http: aiohttp.ClientSession, model: Model) -> None:
    leaving = asyncio.gather(*(leave(http, number) for number in range(20)))
    cached = await asyncio.gather(*(session(http, model, number) for number in range(200)))
    await leaving
    assert sum(cached) > 200 * 40

    async def idle() -> bool:
        return await running(http) == 0

    await until(idle)


async def test_a_client_that_hangs_up_frees_its_place(http: aiohttp.ClientSession) -> None:
    waiting = asyncio.ensure_future(chat(http, [1, 2, 3], max_tokens=500, ignore_eos=True))

    async def busy() -> bool:
        return await running(http) == 1

    async def idle() -> bool:
        return await running(http) == 0

    await until(busy)
    waiting.cancel()
    started = time.monotonic()
    await until(idle)
    assert time.monotonic() - started < 5


async def test_a_seeded_request_repeats_among_others(http: aiohttp.ClientSession) -> None:
    async def ids(seed: int) -> list[int]:
        reply = await chat(http, [9, 8, 7], max_tokens=20, seed=seed)
        return [token for _, token, _ in reply["choices"][0]["meta_info"]["output_token_logprobs"]]

    alone = await ids(3)
    several = await asyncio.gather(*(ids(seed) for seed in (1, 2, 3, 4, 3)))
    assert several[2] == several[4] == alone
    assert several[0] != alone


async def test_openai_client_fields_and_streaming(http: aiohttp.ClientSession) -> None:
    body = {"model": "x", "messages": USER, "max_tokens": 6, "ignore_eos": True, "stream": True, "logprobs": True}
    async with http.post("/v1/chat/completions", json=body) as response:
        lines = [line async for line in response.content if line.strip()]
    assert lines[-1].strip() == b"data: [DONE]"
    assert sum(line.count(b'"top_logprobs"') for line in lines) == 6


async def test_killed_and_back_on_the_same_port(tiny: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    log = tmp_path / "logs" / "engine.log"
    config = EngineConfig(
        model=str(tiny), checkpoint=str(tiny), tito_model="qwen3", log_file=log, progress=lines.append,
        options=("--max-batch", "2", "--weight-version", "v7"),
    )  # fmt: skip
    first = launch_engine(config)
    assert isinstance(first, LocalEngine)
    assert first.pid is not None
    assert lines[0].startswith(f"loading {tiny} on ")
    assert lines[1].startswith("loaded 0.1 M parameters in ")
    port = int(first.urls[0].rpartition(":")[2])
    async with aiohttp.ClientSession(first.urls[0]) as http:
        pending = asyncio.ensure_future(chat(http, [1, 2], max_tokens=500, ignore_eos=True))

        async def busy() -> bool:
            return await running(http) == 1

        await until(busy)
        os.kill(first.pid, signal.SIGKILL)
        with pytest.raises(aiohttp.ClientError):
            await pending
    await until(lambda: not first.alive())
    first.close()
    second = launch_engine(EngineConfig(**{**config.__dict__, "port": port}))
    try:
        assert second.urls == first.urls
        async with aiohttp.ClientSession(second.urls[0]) as http:
            reply = await chat(http, [1, 2], max_tokens=2)
        assert reply["metadata"]["weight_version"] == "v7"
    finally:
        second.close()
        second.close()
    assert not second.alive()
    assert f"ready {port}" in log.read_text()
