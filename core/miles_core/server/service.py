"""What the routes call: sessions, turns and samples, with the engine behind them. No HTTP framework here."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.engine.client import EngineClient, EngineReply
from miles_core.engine.route import Router
from miles_core.errors import (
    ConfigError,
    EngineUnreachable,
    Overloaded,
    RequestError,
)
from miles_core.plugins import Plugin, Registry
from miles_core.plugins.families import family_of, resolve
from miles_core.server.http import Headers
from miles_core.server.matching import guarded_key, guarded_matcher
from miles_core.server.settings import ServerSettings
from miles_core.session import wire
from miles_core.session.assemble import assemble_path
from miles_core.session.body import load_body, parse_body
from miles_core.session.leaves import SampleHook, leaf_samples, tree_metadata
from miles_core.session.policy import LinearPolicy, TreePolicy
from miles_core.session.reply import Generation, read_reply
from miles_core.session.routing import Replay
from miles_core.session.store import SelfCheck, SessionStore, session_metadata
from miles_core.session.turn import (
    PreparedTurn,
    Session,
    TurnRules,
    commit_turn,
    prepare_turn,
)
from miles_core.tito import BoundFamily, ChatTemplate, load_tokenizer
from miles_core.tito.drift import check_template
from miles_core.tito.tokenizer import special_token_variables

log = logging.getLogger("miles.server")

PASSED_ON = frozenset({"v1/models", "tokenize", "detokenize", "health", "model_info", "get_model_info"})
"""Paths below a session that reach the engine."""

NOT_FORWARDED = frozenset({
    b"host", b"content-length", b"transfer-encoding", b"authorization", b"x-api-key", b"api-key", b"cookie",
    b"proxy-authorization", b"connection", b"keep-alive", b"te", b"trailer", b"upgrade", b"expect", b"accept-encoding",
    b"content-type", b"content-encoding", b"x-smg-routing-key",
})  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The plugins a server was told to use, loaded and bound."""

    family: BoundFamily
    matcher: Plugin
    pick: Plugin | None
    postprocess: Plugin | None
    plugins: tuple[str, ...]


def load_family(
    registry: Registry, selector: str, checkpoint: str, template_path: str | None, *, fast: bool = False
) -> tuple[BoundFamily, Plugin]:
    """The selected family (`auto`: the one detected) bound to the checkpoint, `fast` with an encoder for servers.

    Raises PluginError or ConfigError.
    """
    plugin = registry.load("family", resolve(registry, selector, checkpoint))
    family = family_of(plugin)
    tokenizer, template = load_tokenizer(checkpoint, fast=fast), None
    if template_path is not None:
        try:
            text = Path(template_path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--chat-template-path {template_path}: {error}") from error
        template = ChatTemplate(text, source=template_path, variables=special_token_variables(tokenizer.source))
    with plugin.guard("tito_family"):  # a family may bring a class of its own to bind
        return family.bind(tokenizer, plugin.revision, template=template), plugin


def load_parts(settings: ServerSettings, registry: Registry) -> Parts:
    """Load and check everything a server needs, so that faults show at start-up."""
    family, plugin = load_family(
        registry, settings.tito_model, settings.checkpoint, settings.chat_template_path, fast=True
    )
    try:
        family.merge_kwargs(settings.chat_template_kwargs)
    except RequestError as error:
        raise ConfigError(f"--apply-chat-template-kwargs: {error.message}") from error
    check_template(family, strict=settings.strict_template)
    matcher = registry.load("matcher", settings.message_matcher)
    pick = postprocess = None
    if settings.history == "tree":
        pick = registry.load("sample-hook", settings.pick_samples, hook="pick_samples")
        postprocess = registry.load("sample-hook", settings.postprocess_samples, hook="postprocess_samples")
        _require_hook(pick, "pick_samples", "--pick-samples")
        _require_hook(postprocess, "postprocess_samples", "--postprocess-samples")
    loaded = [part for part in (plugin, matcher, pick, postprocess) if part is not None]
    return Parts(
        family=family,
        matcher=matcher,
        pick=pick,
        postprocess=postprocess,
        plugins=tuple(part.describe() for part in loaded),
    )


def replay_of(settings: ServerSettings, config: Mapping[str, Any]) -> Replay:
    """What to record for routing replay. Raises ConfigError if the checkpoint's config has no layer count."""
    layers = config.get("num_hidden_layers") or (config.get("text_config") or {}).get("num_hidden_layers") or 0
    if settings.routing_replay and not layers:
        raise ConfigError(
            f"--use-rollout-routing-replay needs num_hidden_layers in the config.json of {settings.checkpoint}"
        )
    return Replay(
        experts=settings.routing_replay,
        indexer=settings.indexer_replay,
        incremental=settings.incremental_replay,
        layers=int(layers),
    )


def _require_hook(plugin: Plugin, hook: str, flag: str) -> None:
    if not plugin.has(hook):
        raise ConfigError(f"{flag}: {plugin.describe()} has no hook {hook}")


def _sample_hook(plugin: Plugin, hook: str) -> SampleHook:
    return SampleHook(f"{hook} of {plugin.describe()}", lambda samples, metadata: plugin.call(hook, samples, metadata))


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
        self.closing = False
        self.in_flight = 0
        self._check = SelfCheck(parts.family)
        self._hooks: tuple[SampleHook, SampleHook] | None = None
        if parts.pick is not None and parts.postprocess is not None:
            self._hooks = (
                _sample_hook(parts.pick, "pick_samples"),
                _sample_hook(parts.postprocess, "postprocess_samples"),
            )

    async def start(self) -> None:
        """Open the engine client; call inside the event loop that serves."""
        self.client = EngineClient(api_key=self.settings.engine_api_key)

    async def stop(self) -> None:
        """Close the engine client."""
        self.closing = True
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
        self._check.forget(session_id)
        if session.worker is not None:
            self.router.leave(session.worker)
            session.worker = None

    def metadata(self, session: Session) -> dict[str, Any]:
        """The session's metadata as `GET` shows it."""
        kwargs = {**self.settings.chat_template_kwargs, **session.chat_template_kwargs}
        found = session_metadata(session, self.family, self._check, kwargs)
        if self._hooks is not None:
            found["tree"] = tree_metadata(session.forest)
        return found

    def samples(self, session: Session, raw: bytes) -> bytes:
        """The samples payload. Raises RequestError (400) for a wrong body."""
        body = parse_body(raw) if raw.strip() else {}
        limit = body.get("max_seq_len")
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise RequestError(f"max_seq_len must be a positive integer or null (found {limit!r})")
        limit = self.settings.max_seq_len if limit is None else limit
        _object(body, "metadata")
        head = session.forest.last
        metadata = self.metadata(session)
        if head is None:
            return wire.encode([], metadata, empty_reason="no_records")
        if self._hooks is not None:
            metadata["agent"] = body.get("metadata") or {}
            samples = leaf_samples(
                session, self.family, metadata, *self._hooks, max_seq_len=limit, replay=self.rules.replay
            )
            return wire.encode(samples, metadata, empty_reason=None if samples else "all_truncated")
        sample = assemble_path(session, head.path(), self.family, max_seq_len=limit, replay=self.rules.replay)
        if sample is None:
            return wire.encode([], metadata, empty_reason="all_truncated")
        return wire.encode([sample], metadata)

    # -- turns -------------------------------------------------------------------------------------------------

    def prepare(self, session: Session, raw: bytes) -> PreparedTurn:
        """Check, place and render a chat request; nothing changes in the session."""
        self._refuse_when_closing()
        self._refuse_when_full()
        return prepare_turn(session, load_body(raw), self.rules, rid=secrets.token_hex(16))

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
