"""What the routes call: sessions, turns and samples, with the engine behind them. No HTTP framework here."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import orjson

from miles_core.engine.client import EngineClient, EngineReply
from miles_core.engine.route import Router
from miles_core.errors import EngineUnreachable, Overloaded, RequestError
from miles_core.server.http import Headers
from miles_core.server.matching import guarded_key, guarded_matcher
from miles_core.server.offload import Offload
from miles_core.server.parts import Parts, replay_of, sample_hook
from miles_core.server.settings import ServerSettings
from miles_core.session import wire
from miles_core.session.assemble import assemble_path
from miles_core.session.body import load_body, parse_body
from miles_core.session.leaves import SampleHook, leaf_samples, tree_metadata
from miles_core.session.policy import LinearPolicy, TreePolicy
from miles_core.session.reply import Generation, read_reply
from miles_core.session.store import SelfCheck, SessionStore, records, session_metadata
from miles_core.session.turn import (
    PreparedTurn,
    Session,
    TurnRules,
    build_turn,
    commit_turn,
    load_request,
    place_turn,
)

log = logging.getLogger("miles.server")

T = TypeVar("T")

PASSED_ON = frozenset({"v1/models", "tokenize", "detokenize", "health", "model_info", "get_model_info"})
"""Paths below a session that reach the engine."""

NOT_FORWARDED = frozenset({
    b"host", b"content-length", b"transfer-encoding", b"authorization", b"x-api-key", b"api-key", b"cookie",
    b"proxy-authorization", b"connection", b"keep-alive", b"te", b"trailer", b"upgrade", b"expect", b"accept-encoding",
    b"content-type", b"content-encoding", b"x-smg-routing-key",
})  # fmt: skip


LONG_BODY = 2**20
"""Bytes of a request that are read in a thread."""
LONG_TEXT = 2**14
"""Bytes of new messages that are rendered and tokenized in a thread: a millisecond or two."""
LONG_SESSION = 2**14
"""Tokens of a session that is read in a thread."""


@dataclass(frozen=True)
class TurnOutcome:
    """How a turn ended: the engine's own refusal, or a checked generation."""

    turn: PreparedTurn
    refusal: EngineReply | None = None
    generation: Generation | None = None


class SessionService:
    """Every operation of the HTTP API on parsed input. Lives in one event loop."""

    def __init__(self, settings: ServerSettings, parts: Parts) -> None:
        self.settings = settings
        self.family = parts.family
        self.instance_id = secrets.token_hex(16)
        self.store = SessionStore(max_sessions=settings.max_sessions)
        self.rules = TurnRules(
            family=parts.family,
            matches=guarded_matcher(parts.matcher),
            policy=(
                TreePolicy(key=guarded_key(parts.matcher))
                if settings.history == "tree"
                else LinearPolicy(settings.max_rollback)
            ),
            chat_template_kwargs=settings.chat_template_kwargs,
            reject_control_tokens=settings.reject_control_tokens,
            on_tools_change=settings.on_tools_change,
            replay=replay_of(settings, parts.family.tokenizer.config),
            lora_path=settings.lora_path,
        )
        self.router = Router(settings.engine_urls)
        self.client: EngineClient | None = None
        self.offload = Offload()
        self.closing = False
        self.in_flight = 0
        self._check = SelfCheck(parts.family)
        self._hooks: tuple[SampleHook, SampleHook] | None = None
        if parts.pick is not None and parts.postprocess is not None:
            self._hooks = (
                sample_hook(parts.pick, "pick_samples"),
                sample_hook(parts.postprocess, "postprocess_samples"),
            )

    async def start(self) -> None:
        """Open the engine client; call inside the event loop that serves."""
        self.client = EngineClient(api_key=self.settings.engine_api_key)

    async def stop(self) -> None:
        """Close the engine client."""
        self.closing = True
        self.offload.close()
        if self.client is not None:
            await self.client.close()

    @property
    def engine(self) -> EngineClient:
        """The engine client of a started service."""
        if self.client is None:
            raise RuntimeError("the service was not started")
        return self.client

    # -- sessions ----------------------------------------------------------------------------------------------

    def create(self, raw: bytes) -> Session:
        """A new session from the request's body (empty, or an object). Raises RequestError, Overloaded."""
        self._refuse_when_closing()
        body = parse_body(raw) if raw.strip() else {}
        kwargs, metadata = _object(body, "chat_template_kwargs"), _object(body, "metadata")
        self.family.merge_kwargs(self.settings.chat_template_kwargs, kwargs)
        return self.store.create(
            chat_template_kwargs=kwargs, metadata=metadata, with_key=self.settings.api_key is not None
        )

    def delete(self, session_id: str) -> None:
        """Close a session; a turn under way is answered but not committed."""
        session = self.store.delete(session_id)
        self.rules.lines.forget(session.forest)
        if session.worker is not None:
            self.router.leave(session.worker)
            session.worker = None

    def metadata(self, session: Session) -> dict[str, Any]:
        """The session's metadata as `GET` shows it; ids are an array."""
        kwargs = {**self.settings.chat_template_kwargs, **session.chat_template_kwargs}
        found = session_metadata(session, self.family, self._check, kwargs)
        if self._hooks is not None:
            found["tree"] = tree_metadata(session.forest)
        return found

    async def show(self, session: Session, which: str) -> AsyncGenerator[bytes, None]:
        """The session as `GET` shows it, as JSON in parts; `which` records: all, last or none."""
        frozen, run = self._to_read(session)
        rows = records(frozen, which)
        metadata = await run(lambda: orjson.dumps(self.metadata(frozen), option=orjson.OPT_SERIALIZE_NUMPY))
        session.checked = frozen.checked
        yield b'{"session_id":"' + session.id.encode() + b'","records":['
        between = b""
        while (row := await run(lambda: next(rows, None))) is not None:
            yield between
            yield row
            between = b","
        yield b'],"metadata":' + metadata + b"}"

    async def samples(self, session: Session, raw: bytes) -> list[bytes | memoryview]:
        """The samples payload in parts. Raises RequestError (400) for a wrong body."""
        body = parse_body(raw) if raw.strip() else {}
        limit = body.get("max_seq_len")
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise RequestError(f"max_seq_len must be a positive integer or null (found {limit!r})")
        limit = self.settings.max_seq_len if limit is None else limit
        agent = _object(body, "metadata")
        frozen, run = self._to_read(session)
        found = await run(lambda: self._samples(frozen, agent, limit))
        session.checked = frozen.checked
        return found

    def _to_read(self, session: Session) -> tuple[Session, Callable[[Callable[[], T]], Awaitable[T]]]:
        """The session and how to run what reads it: as it is and at once, or if it is long a copy, and in a thread."""
        head = session.forest.last
        if head is None or head.num_tokens < LONG_SESSION:
            return session, _at_once
        return session.frozen(), self.offload.run

    def _samples(self, session: Session, agent: Mapping[str, Any], limit: int | None) -> list[bytes | memoryview]:
        head = session.forest.last
        metadata = self.metadata(session)
        if head is None:
            return wire.encode_parts([], metadata, empty_reason="no_records")
        if self._hooks is not None:
            metadata["agent"] = agent
            samples = leaf_samples(
                session, self.family, metadata, *self._hooks, max_seq_len=limit, replay=self.rules.replay
            )
            return wire.encode_parts(samples, metadata, empty_reason=None if samples else "all_truncated")
        sample = assemble_path(session, head.path(), self.family, max_seq_len=limit, replay=self.rules.replay)
        if sample is None:
            return wire.encode_parts([], metadata, empty_reason="all_truncated")
        return wire.encode_parts([sample], metadata)

    # -- turns -------------------------------------------------------------------------------------------------

    async def prepare(self, session: Session, raw: bytes) -> PreparedTurn:
        """Check, place and render a chat request; nothing changes in the session."""
        self._refuse_when_closing()
        self._refuse_when_full()
        long = len(raw) > LONG_BODY
        body = await self.offload.run(load_request, raw) if long else load_body(raw)
        placed = place_turn(session, body, self.rules, checked=long)
        rid = secrets.token_hex(16)
        if len(raw) <= LONG_TEXT or not placed.is_long(LONG_TEXT):
            return build_turn(placed, self.rules, rid=rid)
        return await self.offload.run(partial(build_turn, placed.apart(), self.rules, rid=rid))

    async def run_turn(self, session: Session, turn: PreparedTurn, headers: Headers) -> TurnOutcome:
        """Ask the engine and commit its answer. Cancelling it aborts the engine's request, and commits nothing.

        Raises EngineUnreachable or EngineReplyError (502), and Overloaded if others came first.
        """
        self._refuse_when_full()
        started = time.time()
        self.in_flight += 1
        try:
            reply = await self._ask(session, turn, headers)
        finally:
            self.in_flight -= 1
        if reply.status != 200:
            return TurnOutcome(turn, refusal=reply)
        generation = read_reply(
            reply.body,
            vocab_size=self.family.tokenizer.vocab_size,
            engine=session.worker or "",
            indexer=self.rules.replay.indexer,
        )
        commit_turn(session, turn, generation, self.rules, started=started, ended=time.time())
        return TurnOutcome(turn, generation=generation)

    async def _ask(self, session: Session, turn: PreparedTurn, headers: Headers) -> EngineReply:
        """One request to the session's worker, and one more, elsewhere if possible, when the connection breaks."""
        worker = self._worker(session)
        sent = forwarded_headers(headers, session.id)
        try:
            return await self._post(worker, turn, sent)
        except EngineUnreachable as error:
            log.warning("%s; trying once more", error.message)
            self.router.failed(worker)
            other = self._move(session, worker)
            # the first request may still run: it is stopped, and an engine refuses a second one under the same id
            self._abort_later(worker, turn.fields["rid"])
            turn.fields["rid"] = secrets.token_hex(16)
            try:
                return await self._post(other, turn, sent)
            except EngineUnreachable:
                self.router.failed(other)
                raise

    async def _post(self, worker: str, turn: PreparedTurn, headers: Mapping[str, str]) -> EngineReply:
        body = turn.sent()
        try:
            reply = await self.engine.request("POST", f"{worker}/v1/chat/completions", body=body, headers=headers)
        except asyncio.CancelledError:
            self._abort_later(worker, turn.fields["rid"])
            raise
        self.router.recovered(worker)
        return reply

    def _abort_later(self, worker: str, rid: str) -> None:
        """The engine may be sampling for nobody; the task outlives this one on purpose."""
        task = asyncio.get_running_loop().create_task(self.engine.abort(worker, rid))
        _background.add(task)
        task.add_done_callback(_background.discard)

    async def pass_on(
        self, session: Session, method: str, path: str, query: str, raw: bytes, headers: Headers
    ) -> EngineReply:
        """A request below a session that is not ours, to the engine; the caller has checked the allow-list."""
        url = f"{self._worker(session)}/{path}" + (f"?{query}" if query else "")
        sent = forwarded_headers(headers, session.id)
        return await self.engine.request(method, url, body=raw or None, headers=sent)

    def _worker(self, session: Session) -> str:
        if session.worker is None:
            session.worker = self.router.choose(session.id)
            self.router.enter(session.worker)
        return session.worker

    def _move(self, session: Session, failed: str) -> str:
        if session.worker == failed:
            self.router.leave(failed)
            session.worker = self.router.choose(session.id, but=failed)
            self.router.enter(session.worker)
        return session.worker or failed

    def _refuse_when_full(self) -> None:
        limit = self.settings.max_concurrent
        if limit and self.in_flight >= limit:
            raise Overloaded(
                f"{self.in_flight} turns are in flight, the limit is {limit} (--max-concurrent)",
                retry_after=1,
            )

    def _refuse_when_closing(self) -> None:
        if self.closing:
            raise Overloaded("the session server is shutting down", retry_after=5, status=503)


async def _at_once(work: Callable[[], T]) -> T:
    return work()


_background: set[asyncio.Task[None]] = set()


def _object(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise RequestError(f"{name} must be an object or null (found {value!r})")
    return value or {}


def forwarded_headers(headers: Headers, session_id: str) -> dict[str, str]:
    """The agent's headers that travel on, plus the routing key."""
    sent = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers if name not in NOT_FORWARDED}
    return {**sent, "Content-Type": "application/json", "X-SMG-Routing-Key": session_id}
