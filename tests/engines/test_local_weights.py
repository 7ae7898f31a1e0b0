"""New weights while requests run: which weights sampled which token, and what a pause leaves as it was."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import torch

from helpers.operator import ADMIN_KEY, Operator
from helpers.sessions import Talk, request
from helpers.tiny import write_model
from miles_core.engine.base import EngineConfig
from miles_core.plugins import Registry
from miles_core.server.app import ServerThread
from miles_core.server.settings import ServerSettings
from miles_engines.local import LocalEngine, launch_engine
from miles_engines.local_server import model as models
from miles_engines.local_server.settings import Settings

USER = [{"role": "user", "content": "hi"}]
PROMPT = [(7 * index * index + 3 * index) % 400 for index in range(40)]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights of the same architecture."""
    return write_model(tmp_path_factory.mktemp("other"), seed=7)


@pytest_asyncio.fixture
async def http(engine: LocalEngine, tiny: Path) -> AsyncIterator[aiohttp.ClientSession]:
    """The shared engine, which gets its own weights back."""
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(engine.urls[0], timeout=timeout) as session:
        yield session
        await post(session, "/abort_request", abort_all=True)
        await post(session, "/continue_generation")
        reply = await post(session, "/update_weights_from_disk", model_path=str(tiny), weight_version="default")
        assert reply["success"]


async def post(http: aiohttp.ClientSession, path: str, *, status: int = 200, **body: Any) -> Any:
    async with http.post(path, json=body) as response:
        text = await response.text()
        assert response.status == status, text
        return json.loads(text) if text.startswith("{") else text


async def chat(http: aiohttp.ClientSession, **fields: Any) -> dict[str, Any]:
    sent = {"input_ids": PROMPT, "logprobs": True, "return_meta_info": True, "ignore_eos": True, **fields}
    reply = await post(http, "/v1/chat/completions", messages=USER, **sent)
    found: dict[str, Any] = reply["choices"][0]["meta_info"]
    return found


async def started(http: aiohttp.ClientSession) -> tuple[asyncio.Task[list[dict[str, Any]]], asyncio.Event]:
    """A streamed generation, and the event that it has begun; its result is all states."""
    begun = asyncio.Event()
    sampling = {"max_new_tokens": 400, "ignore_eos": True, "temperature": 1.0}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "stream": True}

    async def read() -> list[dict[str, Any]]:
        states = []
        async with http.post("/generate", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    states.append(json.loads(line[6:]))
                    begun.set()
        return states

    return asyncio.create_task(read()), begun


def log_probs(settings: Settings, path: Path, tokens: list[int]) -> torch.Tensor:
    weights = models.load(Settings(**{**vars(settings), "model": path}), lambda text: None)
    with torch.inference_mode():
        return torch.log_softmax(weights._network(input_ids=torch.tensor([tokens])).logits[0].float(), -1)


async def info(http: aiohttp.ClientSession) -> Any:
    async with http.get("/model_info") as response:
        return await response.json()


async def test_other_weights_answer_and_have_their_name(
    http: aiohttp.ClientSession, other: Path, settings: Settings
) -> None:
    await chat(http, max_tokens=4)  # leaves keys and values of the old weights behind
    reply = await post(http, "/update_weights_from_disk", model_path=str(other), weight_version="step-2")
    assert reply == {
        "success": True,
        "message": "Succeeded to update model weights. Weight version updated to step-2.",
        "num_paused_requests": 0,
    }
    assert (await info(http))["model_path"] == str(other)
    assert (await info(http))["weight_version"] == "step-2"
    meta = await chat(http, max_tokens=6)
    assert meta["cached_tokens"] == 0
    assert meta["weight_version"] == "step-2"
    assert meta["weight_versions"] == [{"version": "step-2", "start": 0, "end": 6}]
    triples = meta["output_token_logprobs"]
    expected = log_probs(settings, other, PROMPT + [token for _, token, _ in triples])
    for at, (value, token, _) in enumerate(triples, len(PROMPT) - 1):
        assert value == pytest.approx(float(expected[at, token]), abs=1e-4)


async def test_an_update_inside_a_retracted_generation(
    http: aiohttp.ClientSession, other: Path, tiny: Path, settings: Settings
) -> None:
    """Every token's log-prob is what the weights say that sampled it, about all tokens before."""
    task, begun = await started(http)
    await begun.wait()
    assert await post(http, "/pause_generation", mode="retract") == {
        "message": "Generation paused successfully.",
        "status": "ok",
    }
    await post(http, "/update_weights_from_disk", model_path=str(other), weight_version="v2")
    assert not task.done()
    assert (await post(http, "/continue_generation"))["status"] == "ok"
    meta = (await task)[-1]["meta_info"]
    first, second = meta["weight_versions"]
    assert (first["version"], second["version"], meta["weight_version"]) == ("default", "v2", "v2")
    assert (first["start"], first["end"], second["end"]) == (0, second["start"], 400)
    assert meta["num_retractions"] == 1
    triples = meta["output_token_logprobs"]
    tokens = PROMPT + [token for _, token, _ in triples]
    old, new = log_probs(settings, tiny, tokens), log_probs(settings, other, tokens)
    for index, (value, token, _) in enumerate(triples):
        said = old if index < first["end"] else new
        assert value == pytest.approx(float(said[len(PROMPT) + index - 1, token]), abs=1e-4), index


async def test_an_update_inside_a_generation_held_in_place(http: aiohttp.ClientSession, other: Path) -> None:
    task, begun = await started(http)
    await begun.wait()
    await post(http, "/pause_generation", mode="in_place")
    refused = await post(http, "/update_weights_from_disk", status=400, model_path=str(other), weight_version="v2")
    assert refused["success"] is False
    assert "flush_cache=false, or pause with mode=retract" in refused["message"]
    assert (await info(http))["weight_version"] == "default"
    await post(http, "/update_weights_from_disk", model_path=str(other), weight_version="v2", flush_cache=False)
    await post(http, "/continue_generation")
    meta = (await task)[-1]["meta_info"]
    assert [span["version"] for span in meta["weight_versions"]] == ["default", "v2"]
    assert meta["num_retractions"] == 0
    assert meta["completion_tokens"] == 400


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_pause_without_an_update_changes_nothing(http: aiohttp.ClientSession, mode: str) -> None:
    whole = await chat(http, max_tokens=300, seed=5, temperature=1.0)
    other = asyncio.create_task(chat(http, max_tokens=300, seed=5, temperature=1.0))
    while not (await (await http.get("/server_info")).json())["running"]:
        pass
    await post(http, "/pause_generation", mode=mode)
    late = asyncio.create_task(chat(http, max_tokens=3))
    while not (await (await http.get("/server_info")).json())["waiting"]:
        pass
    assert not other.done()
    await post(http, "/continue_generation")
    again = await other
    assert [token for _, token, _ in again["output_token_logprobs"]] == [
        token for _, token, _ in whole["output_token_logprobs"]
    ]
    assert (await late)["completion_tokens"] == 3


async def test_a_pause_that_aborts(http: aiohttp.ClientSession) -> None:
    task, begun = await started(http)
    await begun.wait()
    await post(http, "/pause_generation", mode="abort")
    assert (await task)[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    await post(http, "/continue_generation")
    assert (await chat(http, max_tokens=2))["completion_tokens"] == 2


async def test_an_aborted_request_keeps_what_it_had_when_it_was_retracted(http: aiohttp.ClientSession) -> None:
    task, begun = await started(http)
    await begun.wait()
    await post(http, "/pause_generation", mode="retract")
    await post(http, "/abort_request", abort_all=True)
    last = (await task)[-1]
    assert last["meta_info"]["finish_reason"]["message"] == "Aborted"
    assert len(last["output_ids"]) == last["meta_info"]["completion_tokens"] > 0


async def test_an_update_without_a_pause_waits_for_what_runs(http: aiohttp.ClientSession, other: Path) -> None:
    task, begun = await started(http)
    await begun.wait()
    update = asyncio.create_task(post(http, "/update_weights_from_disk", model_path=str(other), weight_version="v2"))
    meta = (await task)[-1]["meta_info"]
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 400}]
    assert (await update)["success"]
    assert (await chat(http, max_tokens=2))["weight_version"] == "v2"


async def test_weights_that_are_none(http: aiohttp.ClientSession, tmp_path: Path, tiny: Path) -> None:
    async def refused(path: Path) -> str:
        reply = await post(http, "/update_weights_from_disk", status=400, model_path=str(path), weight_version="no")
        assert (reply["success"], reply["num_paused_requests"]) == (False, 0)
        return str(reply["message"])

    assert "no directory with a config.json" in await refused(tmp_path / "missing")
    assert "has shape (512, 96) in" in await refused(write_model(tmp_path / "larger", hidden_size=96))
    assert "in the model that is served" in await refused(write_model(tmp_path / "deeper", num_hidden_layers=3))
    damaged = tmp_path / "damaged"
    shutil.copytree(tiny, damaged)
    (damaged / "model.safetensors").write_bytes(b"nonsense")
    assert str(damaged) in await refused(damaged)
    assert (await info(http))["weight_version"] == "default"
    assert (await chat(http, max_tokens=2))["completion_tokens"] == 2


async def test_a_checkpoint_that_lacks_weights_is_not_served(tmp_path: Path, tiny: Path) -> None:
    """`transformers` would make them up."""
    from safetensors.torch import load_file, save_file

    partial = tmp_path / "partial"
    shutil.copytree(tiny, partial)
    tensors = load_file(partial / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, partial / "model.safetensors", {"format": "pt"})
    with pytest.raises(models.ModelError, match=r"lacks 1 of the model's weights, model\.layers\.1\.mlp\.up_proj"):
        models.load(Settings(model=partial, checkpoint=partial, tito_model="qwen3", device="cpu"), lambda text: None)


@pytest.mark.slow
def test_an_engine_that_is_paused_can_be_stopped(tiny: Path, tmp_path: Path) -> None:
    config = EngineConfig(model=str(tiny), checkpoint=str(tiny), tito_model="qwen3", log_file=tmp_path / "engine.log")
    engine = launch_engine(config)
    try:

        async def pause() -> None:
            async with aiohttp.ClientSession(engine.urls[0]) as http:
                await post(http, "/pause_generation", mode="in_place")

        asyncio.run(pause())
    finally:
        engine.close()
    assert not engine.alive()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_weights_are_updated_through_a_session_server(engine: LocalEngine, tiny: Path, other: Path, mode: str) -> None:
    """The turn that runs goes on with the new weights, and its sample says which tokens are whose."""
    given = ServerSettings(checkpoint=str(tiny), tito_model="qwen3", engine_urls=engine.urls, admin_api_key=ADMIN_KEY)
    with ServerThread(given, Registry.discover()) as server, ThreadPoolExecutor() as pool:
        operator, talk = Operator(server.url), Talk(server.url)
        asking = pool.submit(talk.ask, {"role": "user", "content": "hi"}, max_tokens=300, ignore_eos=True)
        until_running(engine)
        assert operator.ask("POST", "pause_generation", {"mode": mode}).status == 200
        update = {"model_path": str(other), "weight_version": "v2", "flush_cache": mode == "retract"}
        assert operator.ask("POST", "update_weights_from_disk", update).status == 200
        assert operator.ask("POST", "continue_generation", {}).status == 200
        assert asking.result(60).status == 200
        (sample,) = talk.samples().samples
        back = {"model_path": str(tiny), "weight_version": "default"}
        assert operator.ask("POST", "update_weights_from_disk", back).status == 200
    assert sample["weight_versions"] == ["default", "v2"]
    rows = sample["metadata"]["weight_spans"]
    assert [(row["turn"], row["version"]) for row in rows] == [(0, "default"), (0, "v2")]
    assert rows[-1]["end"] == len(sample["tokens"])
    assert rows[1]["end"] - rows[0]["start"] == 300


def until_running(engine: LocalEngine) -> None:
    """Wait until it has a request."""
    while request(f"{engine.urls[0]}/server_info").json["running"] == 0:
        pass
