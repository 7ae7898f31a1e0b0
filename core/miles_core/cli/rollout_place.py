"""Where a rollout's engine and session server are: started here, or given by URL, and asked whether they answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

from miles_core.cli.engine_flags import serving_urls
from miles_core.cli.rollout_view import say
from miles_core.engine.base import EngineConfig
from miles_core.engine.launch import launch
from miles_core.errors import ConfigError, EngineUnreachable, MilesError
from miles_core.rollout.engines import Engines

if TYPE_CHECKING:
    from miles_core.cli.rollout_plan import Plan
    from miles_core.rollout.state import RolloutArgs, RolloutState
    from miles_core.server.settings import ServerSettings

HEALTH_TIMEOUT = 10.0
"""Seconds."""

_OPENER = build_opener(ProxyHandler({}))
"""Engines are reached as the server reaches them: without a proxy."""


@dataclass(frozen=True)
class Place:
    """Where session server and engine are, in words; whether the engine lives, and its log, where it is ours."""

    text: str
    alive: Callable[[], bool] = lambda: True
    log: Path | None = None


@contextmanager
def served(plan: Plan, state: RolloutState) -> Iterator[Place]:
    """Have a session server, ours or a given one, and an engine where it is ours; note in `state` where they are."""
    if plan.flags.session_server_url:
        url = plan.flags.session_server_url.rstrip("/")
        note_session_server(state.args, url, _instance_id(url))
        yield Place(f"session server {url}")
        return
    from miles_core.server.app import ServerThread

    with ExitStack() as stack:
        urls, place = _launch(plan, stack)
        if plan.engine is None:  # one that we started has answered already
            urls = urls_that_answer(urls)
        limit = plan.flags.engine_concurrency
        note_engines(state, urls, limit=limit)
        server = stack.enter_context(ServerThread(_server_settings(plan, urls), turns_at_once=limit))
        state.family = server.parts.family
        note_session_server(state.args, server.url, server.instance_id)
        yield place


def note_session_server(args: RolloutArgs, url: str, instance_id: str) -> None:
    """Where sessions are, under our names and miles'."""
    args.session_server_url, args.session_server_instance_id = url, instance_id
    where = urlsplit(url)
    args.session_server_ip = where.hostname
    args.session_server_ports = [where.port or (443 if where.scheme == "https" else 80)]


def note_engines(state: RolloutState, urls: Sequence[str], *, limit: int | None) -> None:
    """Where `/generate` is answered, under our names and miles', and how long a context may be there."""
    state.engines = Engines(urls, limit=limit)
    where = urlsplit(urls[0])
    state.args.sglang_router_ip = where.hostname
    state.args.sglang_router_port = where.port or (443 if where.scheme == "https" else 80)
    lengths = [length for url in urls if (length := _context_length(url)) is not None]
    state.args.rollout_max_context_len = min(lengths, default=None)


def urls_that_answer(urls: Sequence[str]) -> tuple[str, ...]:
    """The healthy ones first, then the others, which may come up yet.

    Raises EngineUnreachable if no engine answers; one of several that does not is only a warning.
    """
    answered = [url for url in urls if _is_healthy(url, last=len(urls) == 1)]
    if not answered:
        raise EngineUnreachable(f"none of the engines answers: {', '.join(urls)}; are they running?")
    return (*answered, *(url for url in urls if url not in answered))


def _launch(plan: Plan, stack: ExitStack) -> tuple[tuple[str, ...], Place]:
    """Start the engine that is named, or take the given URLs."""
    if plan.engine is None:
        urls = tuple(url.rstrip("/") for url in plan.flags.engines)
        return urls, Place(", ".join(urls))
    config = EngineConfig(
        model=str(plan.model),
        checkpoint=str(plan.checkpoint),
        tito_model=str(plan.flags.tito_model),
        log_file=plan.flags.output / "engine.log",
        options=plan.engine_flags,
        progress=say,
    )
    engine = launch(plan.engine, config)
    stack.callback(engine.close)
    urls = serving_urls(plan.flags.engines[0], engine)
    return urls, Place(f"{plan.engine.describe()} at {', '.join(urls)}", engine.alive, config.log_file)


def _server_settings(plan: Plan, urls: tuple[str, ...]) -> ServerSettings:
    from miles_core.server.settings import ServerSettings

    template = plan.flags.chat_template_path
    return ServerSettings(
        checkpoint=str(plan.checkpoint),
        tito_model=str(plan.flags.tito_model),
        engine_urls=urls,
        message_matcher=plan.flags.message_matcher,
        history=plan.flags.history,
        pick_samples=plan.flags.pick_samples,
        postprocess_samples=plan.flags.postprocess_samples,
        chat_template_kwargs=plan.template_kwargs,
        chat_template_path=str(template) if template else None,
        strict_template=plan.flags.strict_template,
        host="127.0.0.1",
        port=0,
    )


def _is_healthy(url: str, *, last: bool) -> bool:
    """Whether the engine answers `/health`; the only one there is raises instead."""
    try:
        with _OPENER.open(f"{url}/health", timeout=HEALTH_TIMEOUT):
            return True
    except HTTPError as error:
        if error.code == 404:  # it answers, though not to this
            return True
        reason = f"/health says {error.code}"
    except (OSError, ValueError) as error:
        reason = str(getattr(error, "reason", error))
    text = f"--engine {url}: no healthy engine answers there ({reason})"
    if last:
        raise EngineUnreachable(f"{text}; is it running, and is that its address?")
    say(f"{text}; the others are used")
    return False


def _context_length(url: str) -> int | None:
    """`max_model_len` of the engine's model, where it says so."""
    try:
        with _OPENER.open(f"{url}/v1/models", timeout=HEALTH_TIMEOUT) as reply:
            return int(json.loads(reply.read())["data"][0]["max_model_len"])
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        return None


def _instance_id(url: str) -> str:
    """Ask a running session server who it is."""
    try:
        with _OPENER.open(f"{url}/health", timeout=10) as reply:
            return str(json.loads(reply.read())["session_server_instance_id"])
    except OSError as error:
        raise MilesError(f"--session-server-url {url}: no answer: {error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"--session-server-url {url}: its /health is not that of a session server") from error
