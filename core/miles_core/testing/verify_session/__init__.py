"""Drives sessions against a real engine through everything a session may do, and checks every token.

A session server of ours runs in this process, once per kind of history, and is talked to by HTTP as agents do.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count, product

import aiohttp

from miles_core.plugins import Registry
from miles_core.server.app import ServerThread
from miles_core.server.parts import Parts, load_parts
from miles_core.server.settings import ServerSettings
from miles_core.testing.verify_session import checks
from miles_core.testing.verify_session.client import Refusal, SessionClient
from miles_core.testing.verify_session.conversations import CONVERSATIONS, Missed, Scene, events
from miles_core.testing.verify_session.engine import EngineProbe, Told
from miles_core.testing.verify_session.forcing import forcing_of
from miles_core.testing.verify_session.results import (
    AssistantText,
    Check,
    EngineFacts,
    Event,
    Failure,
    Ledger,
    Place,
    Rendering,
    SessionVerification,
    Verdict,
)
from miles_core.testing.verify_session.talk import CALLED_TWICE, Run
from miles_core.tito import BoundFamily
from miles_core.types import Json

__all__ = [
    "AssistantText",
    "Check",
    "EngineFacts",
    "Event",
    "Failure",
    "Options",
    "Rendering",
    "SessionVerification",
    "Verdict",
    "verify_session",
]

AT_ONCE = 8
"""Conversations that are driven at the same time."""

PROBE_TIMEOUT = 60.0
"""Seconds an engine may take to say what it serves."""

TURN_TIMEOUT = 600.0
"""Seconds a request may take."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to drive: `max_tokens` is the limit of a turn that may end by itself."""

    histories: tuple[str, ...] = ("linear", "tree")
    cycles: int = 2
    seed: int = 1
    max_tokens: int = 256
    max_assistant_text_share: float = 0.2
    allow_unverified_rendering: bool = False


def verify_session(
    settings: ServerSettings, options: Options | None = None, *, parts: Parts | None = None
) -> SessionVerification:
    """Drive sessions against the engines of `settings` and say what was found; `settings.history` is not used.

    `parts` are what `load_parts` gives for these settings with tree histories, where they are loaded already.

    Raises ConfigError or PluginError if a setting is wrong, or the engine serves another model; EngineUnreachable if
    no engine answers.
    """
    options = options or Options()
    parts = parts or load_parts(replace(settings, history="tree"), Registry.discover())
    facts, run = asyncio.run(_prepare(parts.family, settings, options))  # no server is needed to know what is amiss
    with ExitStack() as stack:
        servers = {
            history: stack.enter_context(_server(replace(settings, history=history), parts))
            for history in options.histories
        }
        return asyncio.run(_verify(run, facts, settings, options, servers))


def _server(settings: ServerSettings, parts: Parts) -> ServerThread:
    if settings.history == "linear":
        parts = replace(parts, pick=None, postprocess=None)
    return ServerThread(settings, parts=parts)


async def _verify(
    run: Run, facts: EngineFacts, settings: ServerSettings, options: Options, servers: Mapping[str, ServerThread]
) -> SessionVerification:
    async with _http(settings.api_key) as http:
        clients = {history: SessionClient(http, server.url) for history, server in servers.items()}
        await _drive(run, clients, options)
    async with _http(settings.engine_api_key) as http:
        rendering = await _compare_rendering(run, [EngineProbe(http, url) for url in settings.engine_urls], options)
    return _result(run, facts, options, rendering)


def _http(key: str | None) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=aiohttp.ClientTimeout(total=TURN_TIMEOUT, connect=PROBE_TIMEOUT),
        connector=aiohttp.TCPConnector(limit=0),
    )


async def _prepare(bound: BoundFamily, settings: ServerSettings, options: Options) -> tuple[EngineFacts, Run]:
    """What the engines are and can do. Raises ConfigError or EngineUnreachable before any session is driven."""
    forcing = forcing_of(bound)
    serves, same, refusals = [], [], []
    async with _http(settings.engine_api_key) as http:
        for probe in (EngineProbe(http, url) for url in settings.engine_urls):
            serves.append(await probe.serves())
            same.append(await probe.same_tokenizer(bound, settings.checkpoint, serves[-1]))
            refusals.append(await probe.takes_regex(forcing.kwargs, options.max_tokens))
    why_not = next((reason for reason in refusals if reason is not None), None)
    facts = EngineFacts(
        urls=settings.engine_urls,
        serves=next((name for name in serves if name), None),
        forced=why_not is None,
        why_not=why_not or forcing.why_not,
        same_tokenizer=None if None in same else all(same),
    )
    run = Run(
        bound=bound,
        ledger=Ledger(),
        forcing=forcing if why_not is None else None,
        max_tokens=options.max_tokens,
        seeds=count(options.seed * 1_000_003),
    )
    return facts, run


async def _drive(run: Run, clients: dict[str, SessionClient], options: Options) -> None:
    """Every conversation, in every history and cycle."""
    room = asyncio.Semaphore(AT_ONCE)

    async def held(client: SessionClient, place: Place) -> None:
        seed = f"{options.seed} {place.history} {place.conversation} {place.cycle}"
        async with room:
            await _hold(run, client, place, seed)

    places = [
        (client, Place(history=history, conversation=name, cycle=cycle))
        for cycle in range(1, options.cycles + 1)
        for history, client in clients.items()
        for name in CONVERSATIONS
    ]
    await asyncio.gather(*(held(client, place) for client, place in places))


async def _hold(run: Run, client: SessionClient, place: Place, seed: str) -> None:
    """One conversation; what ends it early is a failure, or the reason why an event did not happen."""
    try:
        await CONVERSATIONS[place.conversation](Scene(run=run, client=client, place=place, rng=random.Random(seed)))
    except Missed:
        return  # noted with the event that it was for
    except Refusal as refusal:
        run.ledger.judge(Check.ANSWERED, place, [str(refusal)])
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        run.ledger.judge(Check.ANSWERED, place, [f"no answer: {type(error).__name__}: {error}"])
    except (KeyError, TypeError, IndexError, ValueError) as error:
        run.ledger.judge(Check.ANSWERED, place, [f"an answer lacks what it must have: {type(error).__name__}: {error}"])


async def _compare_rendering(run: Run, probes: Iterable[EngineProbe], options: Options) -> Rendering:
    """First turns of every kind, rendered by each engine itself."""
    told: list[Told] = []
    otherwise = Counter[str]()
    waiting = deque(product(probes, _different(run.openings)))
    while waiting:
        probe, (place, request, ids) = waiting.popleft()
        told.append(found := await probe.render(request))
        faults = list(checks.rendering_faults(run.bound, ids, found.ids, found.count))
        reason = checks.known_otherwise(run.bound, request, found.ids) if faults else None
        if reason is not None:
            otherwise[reason] += 1
            bare = {key: value for key, value in request.items() if key != "tools"}
            rendered = run.bound.render(bare["messages"], None, bare.get("chat_template_kwargs"))
            waiting.append((probe, (place, bare, run.bound.encode(rendered))))
        elif found.ids is not None or found.count is not None:
            run.ledger.judge(Check.RENDERING, place, faults)
    return Rendering(
        asked=len(told),
        otherwise=dict(otherwise),
        told_ids=sum(one.ids is not None for one in told),
        told_count=sum(one.ids is None and one.count is not None for one in told),
        unverified=options.allow_unverified_rendering,
    )


def _different(openings: Iterable[tuple[Place, Json, list[int]]]) -> Iterable[tuple[Place, Json, list[int]]]:
    """An opening of each kind: what differs beside the text of its messages."""

    def kind(request: Json) -> str:
        roles = [message["role"] for message in request["messages"]]
        return json.dumps({**request, "messages": roles}, sort_keys=True)

    return {kind(opening[1]): opening for opening in openings}.values()


def _result(run: Run, facts: EngineFacts, options: Options, rendering: Rendering) -> SessionVerification:
    ledger = run.ledger
    return SessionVerification(
        family=f"{run.bound.name}@{run.bound.revision.name}",
        engine=facts,
        histories=options.histories,
        cycles=options.cycles,
        turns=ledger.turns,
        streams=dict(sorted(ledger.streams.items())),
        events=tuple(_events(run, options.histories)),
        passed={check: ledger.passed[check] for check in Check},
        failures=tuple(ledger.failures),
        assistant_text=AssistantText(
            counted=ledger.counted,
            differing=ledger.differing,
            left_out=ledger.left_out,
            left_out_differing=ledger.left_out_differing,
            strayed=ledger.strayed,
            limit=options.max_assistant_text_share,
        ),
        rendering=rendering,
    )


def _events(run: Run, histories: Iterable[str]) -> Iterable[Event]:
    forced_calls = run.forcing is not None and run.forcing.calls is not None
    for history in histories:
        for name in events(run.bound.family.allowed_append_roles, tree=history == "tree"):
            happened = run.ledger.events[history, name]
            why = None if happened else run.ledger.reasons.get((history, name))
            required = name != CALLED_TWICE or forced_calls
            if not required and not happened:
                why = "needs calls that can be forced"
            yield Event(history=history, name=name, count=happened, required=required, why=why)
