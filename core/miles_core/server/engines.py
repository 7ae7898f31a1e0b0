"""Asking the engine: which worker a session's requests go to, and what is done when one fails."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from miles_core.engine.client import EngineClient, EngineReply
from miles_core.engine.health import HealthChecks
from miles_core.engine.route import Router
from miles_core.errors import EngineUnreachable, Overloaded
from miles_core.server.http import Headers
from miles_core.session.turn import PreparedTurn, Session

log = logging.getLogger("miles.server")

T = TypeVar("T")

NOT_FORWARDED = frozenset({
    b"host", b"content-length", b"transfer-encoding", b"authorization", b"x-api-key", b"api-key", b"cookie",
    b"proxy-authorization", b"connection", b"keep-alive", b"te", b"trailer", b"upgrade", b"expect", b"accept-encoding",
    b"content-type", b"content-encoding", b"x-smg-routing-key",
})  # fmt: skip


class Engines:
    """The workers behind a session server. Lives in the event loop that called `start`."""

    def __init__(self, urls: Sequence[str], *, api_key: str | None = None, health_seconds: float = 0) -> None:
        self.router = Router(urls)
        self._api_key = api_key
        self._health_seconds = health_seconds
        self._client: EngineClient | None = None
        self._health: HealthChecks | None = None
        self._paused: str | None = None
        self._background: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Open the client, and begin to look after the workers if that is wanted."""
        self._client = EngineClient(api_key=self._api_key)
        self._health = HealthChecks(self.router, self._client, self._health_seconds)
        if self._health_seconds:
            self._health.start()

    async def stop(self) -> None:
        """Stop looking after the workers and close the client."""
        if self._health is not None:
            await self._health.stop()
        if self._client is not None:
            await self._client.close()

    @property
    def client(self) -> EngineClient:
        """The client of started engines."""
        if self._client is None:
            raise RuntimeError("the engines were not started")
        return self._client

    @property
    def health(self) -> HealthChecks:
        """The health checks of started engines."""
        if self._health is None:
            raise RuntimeError("the engines were not started")
        return self._health

    @property
    def paused(self) -> str | None:
        """How generation was paused through this server, if it is."""
        return self._paused

    @paused.setter
    def paused(self, mode: str | None) -> None:
        self._paused = mode
        self.health.patient = mode is not None

    def name(self, url: str | None) -> str:
        """A worker's URL, for an error; with what it is where that is the cause."""
        worker = self.router.get(url or "")
        return url or "" if worker is None or worker.router is None else f"{url} ({worker.router})"

    # -- requests ----------------------------------------------------------------------------------------------

    async def ask(self, session: Session, turn: PreparedTurn, headers: Headers) -> EngineReply:
        """A turn's whole answer, whatever its status. Raises EngineUnreachable when the second attempt broke, too.

        Cancelling it aborts the engine's request.
        """
        sent = forwarded_headers(headers, session.id)

        async def once(worker: str) -> EngineReply:
            url = f"{worker}/v1/chat/completions"
            return await self.client.request("POST", url, body=turn.sent(), headers=sent)

        return await self.attempt(session, turn, once)

    async def attempt(self, session: Session, turn: PreparedTurn, once: Callable[[str], Awaitable[T]]) -> T:
        """`once(worker)` with the session's worker, and once more, elsewhere if possible, when the connection breaks.

        `once` sends `turn.sent()`, whose `rid` differs the second time, and returns before anything has reached the
        agent. When it is cancelled, the engine's request is aborted.
        """
        worker = self.worker(session)
        try:
            return await self._once(worker, turn, once)
        except EngineUnreachable as error:
            log.warning("%s; trying once more", error.message)
            self.router.failed(worker, error.message)
            other = self._elsewhere(session, worker)
            # the first request may still run: it is stopped, and an engine refuses a second one under the same id
            self.abort_later(worker, turn.fields["rid"])
            turn.fields["rid"] = secrets.token_hex(16)
            try:
                return await self._once(other, turn, once)
            except EngineUnreachable as again:
                self.router.failed(other, again.message)
                raise

    async def _once(self, worker: str, turn: PreparedTurn, once: Callable[[str], Awaitable[T]]) -> T:
        with self.router.running(worker):
            try:
                found = await once(worker)
            except asyncio.CancelledError:
                self.abort_later(worker, turn.fields["rid"])
                raise
        self.router.recovered(worker)
        return found

    def abort_later(self, worker: str, rid: str) -> None:
        """The engine may be sampling for nobody; the task outlives the one that calls on purpose."""
        task = asyncio.get_running_loop().create_task(self.client.abort(worker, rid))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def pass_on(
        self, session: Session, method: str, path: str, query: str, raw: bytes, headers: Headers
    ) -> EngineReply:
        """A request below a session that is not ours, to its worker; the caller has checked the allow-list.

        What is on that list only looks: when the connection breaks it is sent once more, elsewhere if possible.
        """
        sent = forwarded_headers(headers, session.id)
        rest = path + (f"?{query}" if query else "")
        worker = self.worker(session)
        try:
            return await self.client.request(method, f"{worker}/{rest}", body=raw or None, headers=sent)
        except EngineUnreachable as error:
            self.router.failed(worker, error.message)
            other = self._elsewhere(session, worker)
            return await self.client.request(method, f"{other}/{rest}", body=raw or None, headers=sent)

    # -- sessions ----------------------------------------------------------------------------------------------

    def worker(self, session: Session) -> str:
        """The session's worker: the one it had, unless that is draining, removed or unhealthy while another serves."""
        worker = session.worker
        if worker is not None and self.router.keeps(worker):
            return worker
        return self._move(session, worker)

    def leave(self, session: Session) -> None:
        """The session has ended."""
        if session.worker is not None:
            self.router.leave(session.worker)
            session.worker = None

    def _elsewhere(self, session: Session, worker: str) -> str:
        """Where what broke off at a worker goes: another one, or the same where all others are to be left."""
        try:
            return self._move(session, worker)
        except Overloaded:
            return worker

    def _move(self, session: Session, left: str | None) -> str:
        """Another worker than `left` if there is one; where another turn has moved the session already, that one."""
        if session.worker is None or session.worker == left:
            chosen = self.router.choose(session.id, but=left)
            if session.closed:  # what it asked for last is still answered, but it keeps to no worker any more
                return chosen
            self.leave(session)
            session.worker = chosen
            self.router.enter(chosen)
        return session.worker


def forwarded_headers(headers: Headers, session_id: str) -> Mapping[str, str]:
    """The agent's headers that travel on, plus the routing key."""
    sent = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers if name not in NOT_FORWARDED}
    return {**sent, "Content-Type": "application/json", "X-SMG-Routing-Key": session_id}
