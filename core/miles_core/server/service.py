"""What the routes call: sessions, turns and samples, with the engine behind them. No HTTP framework here."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, TypeVar

import orjson

from miles_core.engine.client import EngineReply
from miles_core.engine.facts import WorkerBook
from miles_core.engine.identify import CHECK
from miles_core.errors import Overloaded, RequestError
from miles_core.server.engines import Engines
from miles_core.server.http import Headers
from miles_core.server.matching import guarded_key, guarded_matcher
from miles_core.server.metrics import Metrics, TurnCount, as_json, families, text
from miles_core.server.offload import Offload
from miles_core.server.parts import Parts, replay_of, sample_hook
from miles_core.server.peers import Peers
from miles_core.server.settings import ServerSettings
from miles_core.session import wire
from miles_core.session.assemble import assemble_path
from miles_core.session.body import load_body, parse_body
from miles_core.session.commit import commit_turn
from miles_core.session.leaves import SampleHook, leaf_samples, tree_metadata
from miles_core.session.policy import LinearPolicy, TreePolicy
from miles_core.session.reply import Generation, read_reply
from miles_core.session.request import Checked, load_checked, request_messages
from miles_core.session.store import SelfCheck, SessionStore, records, session_metadata
from miles_core.session.turn import (
    PreparedTurn,
    Session,
    TurnRules,
    build_turn,
    place_turn,
)

T = TypeVar("T")

PASSED_ON = frozenset({"v1/models", "tokenize", "detokenize", "health", "model_info", "get_model_info"})
"""Paths below a session that reach the engine."""

LONG_BODY = 2**20
"""Bytes of a request that are read in a thread."""
LONG_TEXT = 2**14
"""Bytes of new messages that are rendered and tokenized in a thread: a millisecond or two."""
LONG_SESSION = 2**14
"""Tokens of a session's leaves, all together, that are read in a thread."""
HUGE_SESSION = 2**20
"""Tokens that are read by one request at a time."""


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
        self.engines = Engines(
            settings.engine_urls, api_key=settings.engine_api_key, health_seconds=settings.engine_health_seconds
        )
        self.book = WorkerBook(self._model_info)
        tokenizer = parts.family.tokenizer
        self.spell = lru_cache(maxsize=2**17)(lambda token: tokenizer.decode([token]))
        """The text of one id."""
        self.streams = not (settings.exact_weight_versions or settings.indexer_replay)
        """Whether turns are streamed live where the engine can."""
        self.metrics = Metrics()
        self.offload = Offload()
        self.closing = False
        self.peers: Peers | None = None
        """The other processes of this server, where there are some."""
        self._in_flight = 0
        self._check = SelfCheck(parts.family)
        self._hooks: tuple[SampleHook, SampleHook] | None = None
        if parts.pick is not None and parts.postprocess is not None:
            self._hooks = (
                sample_hook(parts.pick, "pick_samples"),
                sample_hook(parts.postprocess, "postprocess_samples"),
            )

    def join(self, peers: Peers) -> None:
        """Be one process of several: ids of sessions say so, and limits count what the others have."""
        self.peers = peers
        self.store = SessionStore(
            max_sessions=self.settings.max_sessions,
            new_id=peers.new_id,
            elsewhere=peers.other_sessions,
            on_count=peers.tell_sessions,
        )

    @property
    def in_flight(self) -> int:
        """How many turns this process waits for."""
        return self._in_flight

    @in_flight.setter
    def in_flight(self, count: int) -> None:
        self._in_flight = count
        if self.peers is not None:
            self.peers.tell_turns(count)

    async def start(self) -> None:
        """Start asking engines; call inside the event loop that serves."""
        await self.engines.start()

    async def stop(self) -> None:
        """Stop asking engines."""
        self.closing = True
        self.offload.close()
        await self.engines.stop()

    # -- sessions ----------------------------------------------------------------------------------------------

    def create(self, raw: bytes) -> Session:
        """A new session from the request's body (empty, or an object). Raises RequestError, Overloaded."""
        self._refuse_when_closing()
        body = parse_body(raw) if raw.strip() else {}
        kwargs, metadata = _object(body, "chat_template_kwargs"), _object(body, "metadata")
        self.family.merge_kwargs(self.settings.chat_template_kwargs, kwargs)
        session = self.store.create(
            chat_template_kwargs=kwargs, metadata=metadata, with_key=self.settings.api_key is not None
        )
        self.metrics.created += 1
        return session

    def delete(self, session_id: str) -> None:
        """Close a session; a turn under way is answered but not committed."""
        session = self.store.delete(session_id)
        self.rules.lines.forget(session.forest)
        self.engines.leave(session)

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
        tokens = sum(leaf.num_tokens for leaf in session.forest.leaves())
        if tokens < LONG_SESSION:
            return session, _at_once
        return session.frozen(), self.offload.run if tokens < HUGE_SESSION else self.offload.run_alone

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
        started = time.perf_counter()
        with self.counted():
            turn = await self._prepare(session, raw)
        self.metrics.phase("prepare", time.perf_counter() - started)
        return turn

    async def _prepare(self, session: Session, raw: bytes) -> PreparedTurn:
        self._refuse_when_closing()
        self._refuse_when_full()
        long = len(raw) > LONG_BODY
        placed = place_turn(session, await self._load_long(session, raw) if long else load_body(raw), self.rules)
        rid = secrets.token_hex(16)
        if not long and (len(raw) <= LONG_TEXT or not placed.is_long(LONG_TEXT)):
            return build_turn(placed, self.rules, rid=rid)
        return await self.offload.run(partial(build_turn, placed.apart(), self.rules, rid=rid))

    async def _load_long(self, session: Session, raw: bytes) -> Checked:
        """Read a long request, and compare it with the session's last generation, in a thread."""
        request = await self.offload.run(load_checked, raw)
        tip, messages = session.forest.tip, request_messages(request.body)
        ahead, same = tip.copy(), self.rules.policy.same(self.rules.matches)
        await self.offload.run(lambda: ahead.match(messages, ahead.repeated(messages), same))
        if session.forest.tip is tip and tip.node is ahead.node:  # nothing was committed meanwhile
            session.forest.tip = ahead
        return request

    async def run_turn(self, session: Session, turn: PreparedTurn, headers: Headers) -> EngineReply | Generation:
        """Ask the engine and commit its answer: the checked generation, or the engine's own refusal.

        Cancelling it aborts the engine's request, and commits nothing. Raises EngineUnreachable or EngineReplyError
        (502), and Overloaded if others came first.
        """
        started = time.time()
        with self.waiting() as count:
            reply = await self.engines.ask(session, turn, headers)
            return self.conclude(session, turn, reply, started, count)

    @contextmanager
    def waiting(self) -> Iterator[TurnCount]:
        """A turn is in flight while the block runs, and counted as what it came to. Raises Overloaded."""
        with self.counted() as count:
            self._refuse_when_full()
            self.in_flight += 1
            try:
                yield count
            finally:
                self.in_flight -= 1
        count.ended("client_left")  # a stream that was closed before its end

    @contextmanager
    def counted(self) -> Iterator[TurnCount]:
        """An error in the block is how a turn ends."""
        count = TurnCount(self.metrics)
        try:
            yield count
        except BaseException as error:
            count.failed(error)
            raise

    def conclude(
        self, session: Session, turn: PreparedTurn, reply: EngineReply, started: float, count: TurnCount
    ) -> EngineReply | Generation:
        """Check the engine's whole answer and commit it, unless it is a refusal. Raises EngineReplyError (502)."""
        if reply.status != 200:
            count.ended("engine_refused")
            return reply
        ended = time.time()
        generation = read_reply(
            reply.body,
            vocab_size=self.family.tokenizer.vocab_size,
            engine=self.engines.name(session.worker),
            indexer=self.rules.replay.indexer,
        )
        self.commit(session, turn, generation, count, started=started, ended=ended)
        return generation

    def commit(
        self, session: Session, turn: PreparedTurn, generation: Generation, count: TurnCount, *, started: float,
        ended: float,
    ) -> None:  # fmt: skip
        """Put a checked answer into the history and count it; the engine was asked and was done at these times."""
        done = commit_turn(session, turn, generation, self.rules, started=started, ended=ended)
        self.metrics.phase("engine", ended - started)
        self.metrics.phase("commit", time.time() - ended)
        if done and session.forest.last is not None:
            count.committed(session.forest.last.facts, len(generation.sampled))
        else:
            count.ended("aborted" if generation.aborted else "not_committed")

    # -- metrics -----------------------------------------------------------------------------------------------

    def own_measured(self) -> dict[str, Any]:
        """The metrics of this process, and its number."""
        workers = self.engines.router.workers
        found = families(self.metrics, workers, sessions=len(self.store), in_flight=self.in_flight)
        return {"process": self.peers.number if self.peers is not None else 0, "families": as_json(found)}

    async def all_measured(self) -> bytes:
        """The metrics of every process of this server, as Prometheus reads them."""
        found = [self.own_measured()]
        answers = await self.peers.broadcast("GET", "/metrics", b"", []) if self.peers is not None else []
        found += [orjson.loads(body) for status, body in answers if status == 200]
        return text({str(one["process"]): one["families"] for one in sorted(found, key=lambda one: one["process"])})

    async def _model_info(self, worker: str) -> EngineReply:
        return await self.engines.client.request("GET", f"{worker}/model_info", headers=CHECK)

    async def pass_on(
        self, session: Session, method: str, path: str, query: str, raw: bytes, headers: Headers
    ) -> EngineReply:
        """A request below a session that is not ours, to the engine; the caller has checked the allow-list."""
        return await self.engines.pass_on(session, method, path, query, raw, headers)

    def _refuse_when_full(self) -> None:
        limit = self.settings.max_concurrent
        if not limit:
            return
        turns = self.in_flight + (self.peers.other_turns() if self.peers is not None else 0)
        if turns >= limit:
            raise Overloaded(
                f"{turns} turns are in flight, the limit is {limit} (--max-concurrent)",
                retry_after=1,
            )

    def _refuse_when_closing(self) -> None:
        if self.closing:
            raise Overloaded("the session server is shutting down", retry_after=5, status=503)


async def _at_once(work: Callable[[], T]) -> T:
    return work()


def _object(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise RequestError(f"{name} must be an object or null (found {value!r})")
    return value or {}
