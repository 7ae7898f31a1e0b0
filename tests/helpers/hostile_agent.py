"""An agent that goes wrong in every way it can, chosen by the sample's metadata; loaded by dotted path."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import aiohttp

HTTP: list[aiohttp.ClientSession] = []


async def _ask(base_url: str, messages: list[dict[str, Any]], kwargs: dict[str, Any]) -> dict[str, Any]:
    if not HTTP:
        HTTP.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2)))
    body = {"model": "m", "messages": messages, **kwargs}
    async with HTTP[0].post(f"{base_url}/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise ConnectionError(f"{response.status}: {(await response.text())[:200]}")
        message: dict[str, Any] = (await response.json())["choices"][0]["message"]
        return message


async def run_agent(
    base_url: str, prompt: list[dict[str, Any]], request_kwargs: dict[str, Any], metadata: dict[str, Any], **more: Any
) -> Any:
    """Two turns, with whatever goes wrong in between."""
    how, number = metadata["how"], metadata["number"]
    if how == "never starts":
        raise RuntimeError(f"no sandbox for task {number}")
    if how == "exits":
        sys.exit(3)
    messages = [*prompt, await _ask(base_url, prompt, request_kwargs)]
    match how:
        case "fails":
            raise ValueError(f"tool {number} is broken")
        case "slow tool":
            await asyncio.sleep(0.3)
        case "cancels itself":
            raise asyncio.CancelledError
        case "bad reward":
            return {"reward": "good"}
        case "bad answer":
            return ["no", "dict"]
        case "hangs":
            await asyncio.Event().wait()
    messages += [{"role": "user", "content": f"go on {number}"}]
    await _ask(base_url, messages, request_kwargs)
    return {"reward": float(hash_of(metadata) % 3 == 0)}


def hash_of(metadata: dict[str, Any]) -> int:
    """Differs between the rollouts of one prompt, each of which has a session of its own."""
    return int(sum(map(ord, str(metadata.get("session_server_id", "")))) + next(COUNT))


COUNT = iter(range(10**9))


async def abort(args: Any) -> None:
    """Say that it was called."""
    for http in HTTP:
        await http.close()
    print("agent abort", file=sys.stderr)
