"""Many sessions at once stay apart."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from helpers.chat_tokenizer import decode
from helpers.fake_engine import FakeEngine, Reply, says
from helpers.sessions import user
from miles_core.session import wire

SESSIONS, TURNS = 200, 3


def echo(body: dict[str, Any]) -> Reply:
    return says(f"You said: {body['messages'][-1]['content']}", reasoning="")


async def converse(http: aiohttp.ClientSession, url: str, number: int) -> None:
    async with http.post(f"{url}/sessions", json={"metadata": {"number": number}}) as made:
        base = f"{url}/sessions/{(await made.json())['session_id']}"
    messages: list[dict[str, Any]] = []
    for turn in range(TURNS):
        messages.append(user(f"session {number} turn {turn}"))
        async with http.post(f"{base}/v1/chat/completions", json={"model": "m", "messages": messages}) as answer:
            assert answer.status == 200
            message = (await answer.json())["choices"][0]["message"]
        assert message["content"] == f"You said: session {number} turn {turn}"
        messages.append(message)
    async with http.post(f"{base}/samples", json={}) as answer:
        reply = wire.decode(await answer.read())
    (sample,) = reply.samples
    text = decode(sample["tokens"].tolist())
    assert [text.count(f"session {number} turn {turn}") for turn in range(TURNS)] == [2] * TURNS
    assert text.count("session ") == 2 * TURNS
    assert reply.session_metadata["number"] == number
    assert reply.session_metadata["tito_session_mismatch"] == []
    async with http.delete(base) as gone:
        assert gone.status == 204


async def test_sessions_at_once(url: str, engine: FakeEngine) -> None:
    engine.always = echo
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=64)) as http:
        await asyncio.gather(*[converse(http, url, number) for number in range(SESSIONS)])
    assert len(engine.turns) == SESSIONS * TURNS
    assert len({turn["rid"] for turn in engine.turns}) == SESSIONS * TURNS
