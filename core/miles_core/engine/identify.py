"""What answers at an engine's URL: a worker, or a router that drops the fields that turns need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from miles_core.engine.client import EngineClient, EngineReply
from miles_core.errors import EngineUnreachable

CHECK = {"X-Miles-Check": "1"}
"""Marks requests that ask how an engine is, so that its log can tell them from turns."""

REFUSED = {"messages": [{"role": "user", "content": "."}], "input_ids": [], "max_tokens": 1, "stream": False}
"""A chat request that an engine refuses for its ids before it samples; whoever answers it never saw them."""

WAY_OUT = "give --engine the workers' own URLs: the session server keeps sessions to their workers itself"


@dataclass(frozen=True)
class Identity:
    """What is there: `kind` for a person; `router` says why turns cannot work through it, None for an engine."""

    kind: str
    router: str | None = None


async def identify(client: EngineClient, url: str) -> Identity | None:
    """Ask what is at the URL; None if it does not answer. Nothing is sampled by an engine that takes ids."""
    try:
        workers = _router_workers(await _get(client, url, "/workers"), await _get(client, url, "/list_workers"))
        if workers is not None:
            return _router("sglang-router", workers)
        facts = await _facts(client, url, "/model_info", "/get_model_info")
        if not isinstance(facts.get("model_path"), str):
            return Identity("other")
        if await _takes_no_ids(client, url):
            return _router("a router", [])
        server = await _facts(client, url, "/server_info", "/get_server_info")
    except EngineUnreachable:
        return None
    if server.get("engine") == "local":
        return Identity("local")
    version = server.get("version")
    return Identity(f"sglang {version}" if isinstance(version, str) else "sglang")


def _router(name: str, workers: list[str]) -> Identity:
    behind = f" in front of {', '.join(workers)}" if workers else ""
    dropped = "which drops input_ids, return_meta_info and rid of chat requests"
    return Identity(name, f"{name}{behind}, {dropped}; {WAY_OUT}")


async def _get(client: EngineClient, url: str, path: str) -> EngineReply:
    return await client.request("GET", f"{url}{path}", headers=CHECK)


async def _facts(client: EngineClient, url: str, *paths: str) -> Mapping[str, Any]:
    """The first of the paths that is there, as an object; older servers have the last one alone."""
    for path in paths:
        reply = await _get(client, url, path)
        found = _json(reply) if reply.status == 200 else None
        if isinstance(found, dict):
            return found
    return {}


def _router_workers(*replies: EngineReply) -> list[str] | None:
    """The URLs behind a router that lists them; None where nothing does."""
    for reply in replies:
        found = _json(reply) if reply.status == 200 else None
        rows = (found.get("workers", found.get("urls")) if isinstance(found, dict) else None) or None
        if isinstance(rows, list):
            urls = [row.get("url") if isinstance(row, dict) else row for row in rows]
            return [url for url in urls if isinstance(url, str)]
    return None


async def _takes_no_ids(client: EngineClient, url: str) -> bool:
    headers = {**CHECK, "Content-Type": "application/json"}
    body = orjson.dumps({"model": "default", **REFUSED})
    reply = await client.request("POST", f"{url}/v1/chat/completions", body=body, headers=headers)
    return reply.status == 200


def _json(reply: EngineReply) -> Any:
    try:
        return orjson.loads(reply.body)
    except orjson.JSONDecodeError:
        return None
