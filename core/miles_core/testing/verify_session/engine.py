"""Asking the engine itself, beside the session server: what it serves, whether it takes a regex, how it renders."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from miles_core.errors import ConfigError, EngineUnreachable
from miles_core.tito import BoundFamily
from miles_core.types import Json

PROBE = "Where is “Emma”? 1 + 22 = 23;\n\n\tnaïve 数学 🙂 <b>&amp;</b>"
"""What both sides tokenize, to see whether they have one tokenizer."""

_WORDS = ("violet", "orange")
"""Of which a regex lets the model say one; unlikely as an answer that is not forced."""


@dataclass(frozen=True)
class Told:
    """What an engine says of the prompt it made itself; None for what it does not say."""

    ids: list[int] | None
    count: int | None


class EngineProbe:
    """Asks one engine. `http` carries the engine's key."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http, self.url = http, url.rstrip("/")

    async def serves(self) -> str | None:
        """The model, as the engine names it. Raises EngineUnreachable if nothing answers, or what does is no engine."""
        try:
            info, models = await self._get("/model_info"), await self._get("/v1/models")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            text = str(error) or type(error).__name__
            raise EngineUnreachable(
                f"--engine {self.url}: no engine answers there ({text}); is it running, and is that its address?"
            ) from error
        if not isinstance(info, dict) and not isinstance(models, dict):
            raise EngineUnreachable(
                f"--engine {self.url}: what answers there is no engine: neither /model_info nor /v1/models gives JSON"
            )
        name = _first(info, "model_path") or _first(models, "data", 0, "id")
        return name if isinstance(name, str) else None

    async def same_tokenizer(self, bound: BoundFamily, checkpoint: str, serves: str | None) -> bool | None:
        """Whether the engine tokenizes as the checkpoint does; None if it has no `/tokenize`.

        Raises ConfigError if it does not: ids of another model's vocabulary must not reach it.
        """
        status, reply = await self._post("/tokenize", {"prompt": PROBE, "add_special_tokens": False})
        found = reply.get("tokens") if status == 200 and isinstance(reply, dict) else None
        if not isinstance(found, list):
            return None
        own = bound.encode(PROBE)
        if found == own:
            return True
        at = next((i for i, (a, b) in enumerate(zip(own, found, strict=False)) if a != b), min(len(own), len(found)))
        raise ConfigError(
            f"the engine at {self.url} serves {serves or 'a model'} with another tokenizer than --checkpoint "
            f"{checkpoint}: token {at} of a probe text is {_at(found, at)} there and {_at(own, at)} here; give the "
            "checkpoint of the model that is served"
        )

    async def takes_regex(self, kwargs: Mapping[str, Any], max_tokens: int) -> str | None:
        """None if answers can be forced by `regex`, else why not."""
        body = {
            "model": "default",
            "messages": [{"role": "user", "content": "How much is 2 + 2?"}],
            "regex": f"({'|'.join(_WORDS)})",
            "max_tokens": max_tokens,
            **({"chat_template_kwargs": dict(kwargs)} if kwargs else {}),
        }
        status, reply = await self._post("/v1/chat/completions", body)
        if status != 200:
            return f"the engine refuses regex with {status}: {_error(reply)}"
        try:
            said = reply["choices"][0]["message"]["content"]
        except (KeyError, TypeError, IndexError):
            return "the engine's answer to a request with regex has no message"
        return None if str(said).strip() in _WORDS else "the engine takes no notice of regex"

    async def render(self, opening: Mapping[str, Any]) -> Told:
        """The prompt that the engine makes itself of a first turn's request."""
        body = {
            **opening,
            "max_tokens": 1,
            "return_prompt_token_ids": True,
            "return_input_ids_in_sglext": True,
        }
        status, reply = await self._post("/v1/chat/completions", body)
        if status != 200 or not isinstance(reply, dict):
            return Told(None, None)
        ids = _first(reply, "choices", 0, "prompt_token_ids") or _first(reply, "sglext", "input_ids")
        count = _first(reply, "usage", "prompt_tokens")
        return Told(list(ids) if isinstance(ids, list) else None, count if isinstance(count, int) else None)

    async def _get(self, path: str) -> Any:
        async with self._http.get(self.url + path) as reply:
            return _read(await reply.read())

    async def _post(self, path: str, body: Json) -> tuple[int, Any]:
        async with self._http.post(self.url + path, json=body) as reply:
            return reply.status, _read(await reply.read())


def _read(raw: bytes) -> Any:
    """JSON, or the text that is no JSON."""
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode("utf-8", "replace")


def _first(value: Any, *path: str | int) -> Any:
    for key in path:
        try:
            value = value[key]
        except (KeyError, TypeError, IndexError):
            return None
    return value


def _at(ids: Sequence[Any], at: int) -> str:
    return str(ids[at]) if at < len(ids) else "none"


def _error(reply: Any) -> str:
    found = _first(reply, "message") or _first(reply, "error", "message") or _first(reply, "error") or reply
    return str(found)[:200]
