"""Turns that the built-in engine streams through a session server: live, and equal to the whole ones of one seed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from helpers.scripted import Client, scripted
from helpers.sessions import WEATHER, Talk, user
from helpers.streams import Stream, added_up, finish_of, streamed, streaming
from helpers.turns import byte_family, strings, written
from miles_core.plugins import Registry
from miles_core.server.app import ServerThread
from miles_core.server.settings import ServerSettings
from miles_core.testing import write_checkpoint
from miles_engines.local import LocalEngine

# -- a model that samples --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(engine: LocalEngine, tiny: Path) -> Iterator[ServerThread]:
    """A session server in front of the built-in engine."""
    settings = ServerSettings(checkpoint=str(tiny), tito_model="qwen3", engine_urls=engine.urls)
    with ServerThread(settings, Registry.discover()) as running:
        yield running


def sampled(talk: Talk) -> dict[str, Any]:
    """What the sample has of the session."""
    (sample,) = talk.samples().samples
    names = ("tokens", "loss_mask", "rollout_log_probs", "response", "status", "weight_versions")
    return {name: v.tolist() if isinstance(v := sample[name], np.ndarray) else v for name in names}


@pytest.mark.parametrize("thinking", [True, False])
def test_one_seed_gives_one_turn(server: ServerThread, thinking: bool) -> None:
    """Log-probabilities may differ in the last bits: the second prompt is found in the cache."""
    fields = {"seed": 5, "max_tokens": 24, "chat_template_kwargs": {"enable_thinking": thinking}}
    live, whole = Talk(server.url), Talk(server.url)
    for text in ("Is it yes?", "And again?", "Once more?"):
        stream = streamed(live, [*whole.history, user(text)], **fields)
        answer = whole.ask(user(text), **fields)
        assert (stream.form, stream.events[-1]) == ("live", "[DONE]")
        assert len(stream.chunks) > 3
        assert added_up(stream.chunks) == answer.message
        assert finish_of(stream.chunks) == [answer.json["choices"][0]["finish_reason"]]
    ours, theirs = sampled(live), sampled(whole)
    assert np.allclose(ours.pop("rollout_log_probs"), theirs.pop("rollout_log_probs"), atol=1e-4)
    assert ours == theirs


def test_a_client_that_leaves_ends_the_generation(server: ServerThread, engine: LocalEngine) -> None:
    talk = Talk(server.url)
    with streaming(talk, [user("Go on.")], max_tokens=400, ignore_eos=True) as stream:
        stream.next()
    talk.ask(user("Short."), max_tokens=2)
    assert len(talk.records) == 1


# -- what it says, in every family's format --------------------------------------------------------------------

CALLS: list[tuple[str, dict[str, Any]]] = [("f", {"a": "x é"}), ("g", {"b": "1\n2"})]
SAID: dict[str, tuple[list[tuple[str, dict[str, Any]]], str, str]] = {
    "text": ([], "Äpfel 🌊.", "Hm."),
    "calls": (CALLS, "Look:", "Hm.\nYes."),
    "calls alone": (CALLS[:1], "", "Hm."),
}
Serving = Callable[[str], Any]


@pytest.fixture
def serving(tmp_path: Path) -> Serving:
    """A scheduler that plays what a family's model would sample, behind the engine's HTTP and a session server."""

    @asynccontextmanager
    async def start(name: str) -> AsyncIterator[tuple[Client, str]]:
        family = byte_family(name)
        checkpoint = write_checkpoint(tmp_path / name, family.family)
        selector, size = f"{family.name}@{family.revision.name}", family.tokenizer.vocab_size
        async with scripted(checkpoint, family=selector, vocab_size=size) as client:
            settings = ServerSettings(checkpoint=str(checkpoint), tito_model=selector, engine_urls=(client.url,))
            with ServerThread(settings, Registry.discover()) as server:
                yield client, server.url

    return start


def said_by(client: Client, name: str, said: str) -> None:
    """Play it, with the family's stop token."""
    calls, content, reasoning = SAID[said]
    chat = client.service.format
    client.play(written(name, calls, content, reasoning) + chat.decode(chat.stop_ids[:1]))


def told(message: dict[str, Any]) -> dict[str, Any]:
    """A message without the ids that calls were given."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return {"content": message["content"], "reasoning": message["reasoning_content"], "calls": calls}


def both(url: str) -> tuple[Stream, Talk]:
    """The turn live and whole; the samples must be equal."""
    live, whole = Talk(url), Talk(url)
    stream = streamed(live, [user("u")], tools=strings("f", "g"))
    whole.ask(user("u"), tools=strings("f", "g"))
    assert sampled(live) == sampled(whole)
    return stream, whole


@pytest.mark.parametrize("name", ["qwen3", "qwen35", "glm47", "deepseekv32", "kimi26", "minimax_m25", "nemotron3"])
async def test_every_format_streams_as_it_answers(serving: Serving, name: str) -> None:
    async with serving(name) as (client, url):
        for said, (calls, _, _) in SAID.items():
            said_by(client, name, said)
            stream, whole = await asyncio.to_thread(both, url)
            assert stream.form == "live", stream.events
            message = added_up(stream.chunks)
            assert told(message) == told(whole.history[-1])
            read = [(c["name"], json.loads(c["arguments"])) for c in told(message)["calls"]]
            assert read == calls
            assert finish_of(stream.chunks) == ["tool_calls" if calls else "stop"]


async def test_the_clients_stream_helper(serving: Serving) -> None:
    async with serving("qwen3") as (client, url):
        said_by(client, "qwen3", "calls")
        talk = await asyncio.to_thread(Talk, url)
        async with (
            openai.AsyncOpenAI(base_url=f"{talk.url}/v1", api_key="none", max_retries=0) as api,
            api.chat.completions.stream(model="m", messages=[user("u")], tools=strings("f", "g")) as stream,
        ):
            message = (await stream.get_final_completion()).choices[0].message
    assert [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or []] == CALLS
    assert message.content == "Look:"


# -- ends and faults -------------------------------------------------------------------------------------------


async def held(client: Client, url: str, text: str) -> tuple[Talk, Any]:
    """A streamed turn that stands still in its middle, and the thread that reads it."""
    client.play(text)
    client.scheduler.hold = 5
    talk = await asyncio.to_thread(Talk, url)
    reading = asyncio.create_task(asyncio.to_thread(streamed, talk, [user("u")], tools=[WEATHER]))
    while not client.scheduler.jobs or len(client.scheduler.jobs[-1].output_ids) < 5:
        await asyncio.sleep(0)
    return talk, reading


async def test_an_aborted_stream_ends_with_what_there_is(serving: Serving) -> None:
    async with serving("qwen3") as (client, url):
        talk, reading = await held(client, url, "the quick brown fox jumps")
        await client.send("/abort_request", {"rid": client.scheduler.jobs[-1].rid})
        stream = await reading
        assert finish_of(stream.chunks) == ["abort"]
        assert stream.events[-1] == "[DONE]"
        assert await asyncio.to_thread(lambda: (talk.records, talk.metadata["aborted"])) == ([], True)


async def test_a_step_that_fails_is_a_fault_inside_the_stream(serving: Serving) -> None:
    async with serving("qwen3") as (client, url):
        talk, reading = await held(client, url, "the quick brown fox jumps")
        job = client.scheduler.jobs[-1]
        job.end({"type": "abort", "message": "out of memory", "status_code": 500, "err_type": "InternalServerError"})
        job.changed.set()
        stream = await reading
        kind, _, data = stream.events[-1].partition("\n")
        assert kind == "event: error"
        error = json.loads(data)
        assert (error["error"], error["code"]) == ("the engine failed: out of memory", 500)
        assert await asyncio.to_thread(lambda: talk.records) == []
