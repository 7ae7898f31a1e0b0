"""A plain HTTP client of a session server, as an agent is one: sessions, turns whole and streamed, samples."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from miles_core.session import wire
from miles_core.types import Json, Message


class Refusal(Exception):
    """An answer that is not 200, or an error event in a stream."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status, self.text = status, text


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What an agent gets for a turn. Ids and log-probabilities are None where the answer does not tell them."""

    message: Message
    finish: str | None
    id: str | None
    stream: str | None = None
    """`live` or `whole` of a streamed turn, as the server says; `unnamed` if it does not."""
    prompt_ids: list[int] | None = None
    prompt_tokens: int | None = None
    ids: list[int] | None = None
    log_probs: list[float] | None = None


class SessionClient:
    """Talks to one session server."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http, self._url = http, url

    async def create(self, kwargs: Mapping[str, Any]) -> str:
        """A new session's id."""
        body = {"chat_template_kwargs": dict(kwargs)} if kwargs else {}
        return str((await self._json("POST", "/sessions", body))["session_id"])

    async def show(self, session: str, records: str) -> Json:
        """`GET /sessions/{id}` with `records` all, last or none."""
        return await self._json("GET", f"/sessions/{session}?records={records}")

    async def delete(self, session: str) -> None:
        """Forget a session."""
        async with self._http.delete(f"{self._url}/sessions/{session}") as reply:
            await _require(reply)

    async def samples(self, session: str) -> wire.SamplesReply:
        """The session's samples."""
        async with self._http.post(f"{self._url}/sessions/{session}/samples", json={}) as reply:
            await _require(reply)
            return wire.decode(await reply.read())

    async def chat(self, session: str, body: Json) -> Answer:
        """One turn; raises Refusal."""
        async with self._http.post(f"{self._url}/sessions/{session}/v1/chat/completions", json=body) as reply:
            await _require(reply)
            if body.get("stream"):
                return await _streamed(reply)
            return _whole(await reply.json(content_type=None))

    async def _json(self, method: str, path: str, body: Json | None = None) -> Json:
        async with self._http.request(method, self._url + path, json=body) as reply:
            await _require(reply)
            return await reply.json(content_type=None)


async def _require(reply: aiohttp.ClientResponse) -> None:
    """Raises Refusal, with the error's own text, unless the answer is a success."""
    if reply.status < 300:
        return
    text = (await reply.read()).decode("utf-8", "replace")
    try:
        found = json.loads(text)
        text = str(found.get("error") or found.get("message") or text)
    except (ValueError, AttributeError):
        pass
    raise Refusal(reply.status, text)


def _whole(reply: Json) -> Answer:
    choice = reply["choices"][0]
    pairs = choice["meta_info"]["output_token_logprobs"]
    return Answer(
        message=choice["message"],
        finish=choice.get("finish_reason"),
        id=reply.get("id"),
        prompt_ids=choice.get("prompt_token_ids"),
        prompt_tokens=choice["meta_info"].get("prompt_tokens"),
        ids=[pair[1] for pair in pairs],
        log_probs=[pair[0] for pair in pairs],
    )


async def _streamed(reply: aiohttp.ClientResponse) -> Answer:
    """The message that a stream's deltas amount to. Raises Refusal for an error event, or a stream without an end."""
    parts = _Parts()
    async for line in reply.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            how = reply.headers.get("x-miles-stream", "unnamed")
            return Answer(message=parts.message(), finish=parts.finish, id=parts.id, stream=how)
        parts.take(json.loads(data))
    raise Refusal(reply.status, "the stream ended without [DONE]")


class _Parts:
    """Deltas, put together."""

    def __init__(self) -> None:
        self.id: str | None = None
        self.finish: str | None = None
        self._texts: dict[str, str] = {}
        self._calls: dict[int, Json] = {}

    def take(self, event: Json) -> None:
        if "error" in event:
            raise Refusal(int(event.get("code") or 500), str(event["error"]))
        self.id = event.get("id") or self.id
        for choice in event.get("choices") or ():
            self.finish = choice.get("finish_reason") or self.finish
            delta = choice.get("delta") or {}
            for key in ("content", "reasoning_content"):
                self._texts[key] = self._texts.get(key, "") + (delta.get(key) or "")
            for call in delta.get("tool_calls") or ():
                self._take_call(call)

    def _take_call(self, part: Json) -> None:
        blank = {"id": None, "type": "function", "function": {"name": None, "arguments": ""}}
        call = self._calls.setdefault(part["index"], blank)
        call["id"] = part.get("id") or call["id"]
        function = part.get("function") or {}
        call["function"]["name"] = function.get("name") or call["function"]["name"]
        call["function"]["arguments"] += function.get("arguments") or ""

    def message(self) -> Message:
        """The assistant's message, with the keys that say something."""
        message: Message = {"role": "assistant", "content": self._texts.get("content", "")}
        if self._texts.get("reasoning_content"):
            message["reasoning_content"] = self._texts["reasoning_content"]
        if self._calls:
            message["tool_calls"] = [self._calls[index] for index in sorted(self._calls)]
        return message
