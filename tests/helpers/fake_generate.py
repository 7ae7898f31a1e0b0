"""An engine that answers `/generate` from a script, and records what it was asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from aiohttp import web

from helpers.chat_tokenizer import IM_END, chat_family, decode, encode
from helpers.fake_engine import sampled_text
from miles_core.rollout.engines import Engines
from miles_core.rollout.state import RolloutArgs, RolloutState

Answer: TypeAlias = dict[str, Any] | int | tuple[int, str]
"""A reply, a status, or a status with a message."""


def reply(ids: list[int], finish: str = "stop", **meta: Any) -> dict[str, Any]:
    """What SGLang answers; log-probabilities are all different."""
    return {
        "text": decode(ids),
        "output_ids": ids,
        "meta_info": {
            "finish_reason": {"type": finish},
            "completion_tokens": len(ids),
            "prompt_tokens": 7,
            "cached_tokens": 2,
            "weight_version": "w1",
            "output_token_logprobs": [[-(at + 1) / 64, number, None] for at, number in enumerate(ids)],
            **meta,
        },
    }


def says(content: str, *calls: tuple[str, str], finish: str = "stop", reasoning: str = "Well.") -> dict[str, Any]:
    """A whole answer of Qwen3, with its end-of-turn token unless it was cut off."""
    ids = encode(sampled_text(content, reasoning, calls))
    return reply([*ids, IM_END] if finish == "stop" else ids, finish)


@dataclass
class FakeGenerate:
    """The engine; `script` is used up, then it says `Fine.`"""

    script: list[Answer | Callable[[dict[str, Any]], Answer]] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    hold: asyncio.Event | None = None
    """If set, generations wait for it, or until they are aborted."""
    on_abort: list[int] = field(default_factory=list)
    """What a generation that is aborted while it waits has sampled."""
    waiting: dict[str, asyncio.Event] = field(default_factory=dict)
    running: int = 0
    most: int = 0
    """The most generations under way at once."""
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        self.entered.set()
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if await self._is_aborted(body.get("rid", "")):
                return web.json_response(reply(self.on_abort, "abort"))
        finally:
            self.running -= 1
        answer = self.script.pop(0) if self.script else says("Fine.")
        if callable(answer):
            answer = answer(body)
        if isinstance(answer, int):
            answer = (answer, f"scripted {answer}")
        if isinstance(answer, tuple):
            return web.json_response({"error": {"message": answer[1]}}, status=answer[0])
        return web.json_response(answer)

    async def _is_aborted(self, rid: str) -> bool:
        """Wait as told; whether the request was aborted meanwhile."""
        if self.hold is None:
            await asyncio.sleep(0)
            return False
        event = self.waiting[rid] = asyncio.Event()
        waits = [asyncio.ensure_future(self.hold.wait()), asyncio.ensure_future(event.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return event.is_set()

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        self.aborted.append(rid)
        if rid in self.waiting:
            self.waiting[rid].set()
        return web.Response()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[FakeGenerate]:
        """Serve in the running loop."""
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield self
        finally:
            await runner.cleanup()


@contextmanager
def serving_in_thread(fake: FakeGenerate) -> Iterator[str]:
    """Serve in a thread with its own loop, for tests that are not async; yields the URL."""
    ready = threading.Event()
    place: list[Any] = []

    async def main() -> None:
        stop = asyncio.Event()
        async with fake.serving():
            place.extend([asyncio.get_running_loop(), stop])
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield fake.url
    finally:
        place[0].call_soon_threadsafe(place[1].set)
        thread.join(10)


def state_of(*urls: str, limit: int | None = None, **args: Any) -> RolloutState:
    """A run's state on Qwen3's small tokenizer; `args` that are none of ours are added as flags."""
    known = {name: value for name, value in args.items() if hasattr(RolloutArgs(), name)}
    settings = RolloutArgs(**known)
    settings.add({name: value for name, value in args.items() if name not in known})
    return RolloutState(settings, family=chat_family(), engines=Engines(urls, limit=limit) if urls else None)
