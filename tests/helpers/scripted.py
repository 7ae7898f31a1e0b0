"""The built-in engine's HTTP application with a scheduler that plays given tokens instead of running a model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
from aiohttp import web

from miles_engines.local_server import chat_format
from miles_engines.local_server.http import build_app
from miles_engines.local_server.job import Finish, Job
from miles_engines.local_server.scheduler import ABORTED, ABORTED_IN_QUEUE
from miles_engines.local_server.service import Service
from miles_engines.local_server.settings import Settings

LOGPROB = -0.5


class ScriptedScheduler:
    """Plays `script` for every job: one token per turn of the event loop, then `ending` or the job's limit.

    `hold` keeps jobs waiting at that many tokens, until they are aborted.
    """

    def __init__(self, stop_ids: Iterable[int]) -> None:
        self.weight_version = "default"
        self.script: list[int] = []
        self.ending: Finish | None = None
        self.hold: int | None = None
        self.cached = 1
        self.jobs: list[Job] = []
        self._stop_ids = frozenset(stop_ids)
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, job: Job) -> None:
        self.jobs.append(job)
        task = asyncio.ensure_future(self._play(job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _play(self, job: Job) -> None:
        if self.hold == 0:
            return
        job.started, job.cached_tokens = True, self.cached
        for token in self.script[: job.params.max_new_tokens]:
            await asyncio.sleep(0)
            if job.finish is not None or len(job.output_ids) == self.hold:
                return
            tops = [(LOGPROB, token), (-2.0, 5)][: job.params.top_logprobs] if job.params.top_logprobs else None
            job.accept(token, LOGPROB, tops, self.weight_version)
            string = job.stops.found(job.output_ids)
            if string is not None or (token in self._stop_ids and not job.params.ignore_eos):
                job.end({"type": "stop", "matched": token if string is None else string})
            job.published = len(job.output_ids)
            job.changed.set()
            if job.finish is not None:
                return
        job.end(self.ending or {"type": "length", "length": job.params.max_new_tokens})
        job.changed.set()

    def abort(self, which: Callable[[Job], bool]) -> None:
        for job in self.jobs:
            if job.finish is None and which(job):
                job.end(dict(ABORTED if job.started else ABORTED_IN_QUEUE))
                job.changed.set()

    def flush(self) -> Future[bool]:
        return self.call(lambda: all(job.finish is not None for job in self.jobs))

    def call(self, action: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(action())
        return future


class Client:
    """Speaks to the application over real HTTP."""

    def __init__(
        self, session: aiohttp.ClientSession, service: Service, scheduler: ScriptedScheduler, url: str
    ) -> None:
        self.session, self.service, self.scheduler, self.url = session, service, scheduler, url

    def play(self, text: str, **ending: Any) -> None:
        """What the model will say, and how it ends if no stop token does it."""
        self.scheduler.script = self.service.format.encode(text)
        self.scheduler.ending = ending or None

    async def send(self, path: str, body: Any = None, method: str = "POST") -> tuple[int, Any]:
        """Status and JSON (or text) of an answer."""
        async with self.session.request(method, path, json=body) as response:
            text = await response.text()
            return response.status, json.loads(text) if response.content_type == "application/json" else text

    async def chat(self, **fields: Any) -> dict[str, Any]:
        """A whole chat answer."""
        status, body = await self.send("/v1/chat/completions", {"model": "x", "messages": USER, **fields})
        assert status == 200, body
        return cast("dict[str, Any]", body)

    async def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a stream, whose end it checks."""
        async with self.session.post(path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            lines = [line for line in (await response.text()).split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    async def chat_stream(self, **fields: Any) -> list[dict[str, Any]]:
        """The events of a streamed chat answer."""
        return await self.stream("/v1/chat/completions", {"model": "x", "messages": USER, **fields})


USER = [{"role": "user", "content": "What is the weather in Paris?"}]


@asynccontextmanager
async def scripted(
    directory: Path, *, family: str = "qwen3", context: int = 4096, vocab_size: int = 512, **settings: Any
) -> AsyncIterator[Client]:
    """A served application; `directory` has a tokenizer."""
    chosen = Settings(model=directory, checkpoint=directory, tito_model=family, **settings)
    format_ = chat_format.load(family, str(directory))
    scheduler = ScriptedScheduler(format_.stop_ids)
    facts = SimpleNamespace(
        path=directory,
        context_length=context,
        vocab_size=vocab_size,
        generation_defaults={},
        model_type="qwen3",
        architectures=["Qwen3ForCausalLM"],
        device="cpu",
    )
    service = Service(chosen, cast("Any", facts), format_, cast("Any", scheduler))
    runner = web.AppRunner(build_app(service), handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with aiohttp.ClientSession(url) as session:
        yield Client(session, service, scheduler, url)
    await runner.cleanup()
