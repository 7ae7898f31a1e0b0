"""A turn whose agent wants a stream: live, as it is sampled, where that is exact; else whole, in one chunk."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from miles_core.engine.client import EngineReply, EngineStream
from miles_core.engine.events import EventReader
from miles_core.engine.facts import WorkerFacts, versions_between
from miles_core.errors import EngineUnreachable, InexactStream
from miles_core.server.answers import late_error, passed_through
from miles_core.server.engines import forwarded_headers
from miles_core.server.http import Headers, Reply
from miles_core.server.metrics import TurnCount
from miles_core.server.stream import KEEPALIVE, error_event, event, whole_answer
from miles_core.session.live import LiveReply
from miles_core.session.reply import Generation
from miles_core.session.turn import PreparedTurn, Session

if TYPE_CHECKING:
    from miles_core.server.service import SessionService

log = logging.getLogger("miles.server")

EVENTS = b"text/event-stream"

LONG_ANSWER = 2**11
"""Sampled tokens of a stream that is added up in a thread: a few milliseconds."""


def stream_headers(form: bytes) -> Headers:
    """The headers of a stream; `form` is `live` or `whole`."""
    return [(b"x-miles-stream", form), (b"cache-control", b"no-cache")]


@dataclass
class LiveStream:
    """The engine's answer to a turn, as it comes; it is read as far as `ready`, events for the agent."""

    turn: PreparedTurn
    """As it was sent."""
    worker: str
    source: EngineStream
    reply: LiveReply
    before: WorkerFacts | None
    ready: list[bytes] = field(default_factory=list)
    _events: EventReader = field(default_factory=EventReader)

    async def read(self) -> list[bytes]:
        """The next events for the agent, once something has come; there may be none in it.

        Raises EngineUnreachable if the stream breaks off, EngineFault and EngineReplyError for what stands in it.
        """
        piece = await self.source.piece()
        if not piece:
            raise EngineUnreachable(
                f"the engine at {self.worker} could not be reached or broke off: its stream ended without [DONE]"
            )
        events: list[bytes] = []
        for data in self._events.feed(piece):
            events += map(event, self.reply.take(data))
            if self.reply.done:
                break
        return events


class StreamedTurn:
    """One turn, from the request to the last event. `close` must follow `reply`, or the end of what it gave."""

    def __init__(self, service: SessionService, session: Session, turn: PreparedTurn, headers: Headers) -> None:
        self._service, self._session, self._turn = service, session, turn
        self._sent = forwarded_headers(headers, session.id)
        self._patience = service.settings.keepalive_seconds
        self._started = time.time()
        self._waiting = ExitStack()
        self._count: TurnCount | None = None
        self._live: LiveStream | None = None
        self._form = b"whole"
        self._decided: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when `_form` is how the turn was asked for: headers say it."""

    async def reply(self) -> Reply:
        """The answer, as soon as its first event is there, or a keep-alive comment is due.

        What goes wrong before that keeps its status: raises MilesError.
        """
        task = asyncio.ensure_future(self._begin())
        try:
            await asyncio.wait({task}, timeout=self._patience)
            if not self._decided.done():
                either: set[asyncio.Future[Any]] = {task, self._decided}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                late = self._late(task)
                return Reply(late, kind=EVENTS, headers=stream_headers(self._form), close=lambda: self._leave(task))
            begun = await task
            if isinstance(begun, LiveStream):
                first = b"".join(begun.ready)
                events = self._rest(begun)
                return Reply(events, kind=EVENTS, headers=stream_headers(b"live"), first=first, close=self.close)
            found = self._conclude(begun)
        except BaseException as error:
            self._fail(error)
            self._leave(task)
            raise
        self.close()
        if isinstance(found, EngineReply):
            return passed_through(found)
        return Reply(b"".join(self._whole(found)), kind=EVENTS, headers=stream_headers(b"whole"))

    def _fail(self, error: BaseException) -> None:
        if self._count is not None:
            self._count.failed(error)

    def _leave(self, task: asyncio.Task[EngineReply | LiveStream]) -> None:
        task.cancel()
        self.close()

    def close(self) -> None:
        """Nothing more is wanted of it: an engine that still samples is told to stop."""
        self._waiting.close()
        live, self._live = self._live, None
        if live is None:
            return
        live.source.close()
        if not live.reply.done:
            log.info("session %s: its streamed turn was left, and aborted", self._session.id)
            self._service.engines.abort_later(live.worker, live.turn.fields["rid"])

    # -- asking ------------------------------------------------------------------------------------------------

    async def _begin(self) -> EngineReply | LiveStream:
        """The engine's whole answer, or a live one whose first event is there."""
        self._count = self._waiting.enter_context(self._service.waiting())
        return await self._service.engines.attempt(self._session, self._turn, self._once)

    async def _once(self, worker: str) -> EngineReply | LiveStream:
        book, facts = self._service.book, None
        if self._service.streams and self._turn.streamable:
            facts = await book.facts(worker)
        url, client = f"{worker}/v1/chat/completions", self._service.engines.client
        self._started = time.time()
        exact = book.streams(worker, facts)
        self._form = b"live" if exact else b"whole"
        if not self._decided.done():
            self._decided.set_result(None)
        if not exact:
            return await client.request("POST", url, body=self._turn.sent(), headers=self._sent)
        turn = self._turn.live()
        source = await client.stream(url, body=turn.sent(), headers=self._sent)
        try:
            if source.status != 200 or b"event-stream" not in (source.header(b"content-type") or b""):
                whole = await source.whole()
                source.close()
                return whole
            live = LiveStream(turn, worker, source, self._reader(worker), facts)
            while not (live.ready or live.reply.done):
                live.ready = await live.read()
        except BaseException:
            source.close()
            raise
        self._live = live
        self._waiting.enter_context(self._service.engines.router.running(worker))
        return live

    def _reader(self, worker: str) -> LiveReply:
        return LiveReply(
            engine=worker,
            vocab_size=self._service.family.tokenizer.vocab_size,
            spell=self._service.spell,
            asked=self._turn.fields,
            include_usage=self._turn.include_usage,
        )

    # -- answering ---------------------------------------------------------------------------------------------

    async def _late(self, task: asyncio.Task[EngineReply | LiveStream]) -> AsyncGenerator[bytes, None]:
        """Keep-alive comments until there is something to say, then that; a fault is an error event."""
        yield KEEPALIVE
        while not task.done():
            await asyncio.wait({task}, timeout=self._patience)
            if not task.done():
                yield KEEPALIVE
        try:
            begun = await task
            events = [] if isinstance(begun, LiveStream) else self._late_whole(begun)
        except Exception as error:
            self._fail(error)
            yield error_event(late_error(error))
            return
        if isinstance(begun, LiveStream):
            yield b"".join(begun.ready)
            async for some in self._rest(begun):
                yield some
        for one in events:
            yield one

    def _late_whole(self, reply: EngineReply) -> list[bytes]:
        found = self._conclude(reply)
        if isinstance(found, EngineReply):
            text = found.body.decode("utf-8", "replace")
            return [error_event({"error": text, "type": "engine_error", "code": found.status})]
        return self._whole(found)

    def _conclude(self, reply: EngineReply) -> EngineReply | Generation:
        """Commit an answer that came whole, unless it is a refusal."""
        return self._service.conclude(self._session, self._turn, reply, self._started, self._counted)

    @property
    def _counted(self) -> TurnCount:
        if self._count is None:
            raise RuntimeError("the turn has not begun")
        return self._count

    def _whole(self, generation: Generation) -> list[bytes]:
        return list(whole_answer(generation, include_usage=self._turn.include_usage))

    async def _rest(self, live: LiveStream) -> AsyncGenerator[bytes, None]:
        """What comes after the first events; the last ones when the turn is committed."""
        try:
            while not live.reply.done:
                try:
                    async with asyncio.timeout(self._patience):
                        events = await live.read()
                except TimeoutError:
                    events = [KEEPALIVE]
                if events:
                    yield b"".join(events)
            await self._commit(live)
        except Exception as error:
            if isinstance(error, EngineUnreachable):
                self._service.engines.router.failed(live.worker, error.message)
            self._fail(error)
            yield error_event(late_error(error))
            return
        yield b"".join(map(event, live.reply.held()))

    async def _commit(self, live: LiveStream) -> None:
        book = self._service.book
        versions = versions_between(live.before, await book.facts(live.worker))
        try:
            if live.reply.sampled > LONG_ANSWER:
                generation = await self._service.offload.run(live.reply.generation, versions)
            else:
                generation = live.reply.generation(versions)
        except InexactStream as error:
            book.whole_only(live.worker, error.message)
            raise
        self._service.commit(
            self._session, live.turn, generation, self._counted, started=self._started, ended=time.time()
        )
