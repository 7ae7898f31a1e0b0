"""What a turn costs against the floor: the table, how it grows, many sessions at once, many processes, many a day."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace

from load import Agent, Workload, connections, measure
from processes import Bench, Served
from report import Figure

TABLE: tuple[tuple[Workload, float], ...] = (
    (Workload(sessions=8, turns=10, tokens=200, at_once=4), 2.0),
    (Workload(sessions=8, turns=40, tokens=200, at_once=4), 2.2),
    (Workload(sessions=2, turns=20, tokens=200, at_once=2, first=30_000), 2.5),
    (Workload(sessions=32, turns=50, tokens=200, at_once=32, close=True), 2.0),
    (Workload(sessions=4, turns=150, tokens=300, at_once=4, keep=True), 2.2),
)
"""Workloads, and how much more than the floor a turn may cost."""

SHORT_TABLE = (*TABLE[:3], (replace(TABLE[3][0], turns=20), TABLE[3][1]), TABLE[4])
HISTORIES = ("linear", "tree")
MEGABYTES = 2.5
"""Memory of a kept session of 150 turns."""

LEAST_TURNS = 80
"""Short workloads are repeated until their noise is small."""


def table(bench: Bench, *, short: bool = False) -> Iterator[Figure]:
    """CPU per turn as a multiple of the floor's in the same run; memory of kept sessions."""
    engine = bench.engine()
    floor = bench.floor(engine)
    for history in HISTORIES:
        server = bench.server(engine, flags=("--history", history))
        for work, bar in SHORT_TABLE if short else TABLE:
            yield from _against_floor(history, work, bar, floor, server, 1 if short else 3)


def _against_floor(
    history: str, work: Workload, bar: float, floor: Served, server: Served, rounds: int
) -> Iterator[Figure]:
    """The least of several rounds; a round is floor and server, one after the other."""
    enough = max(work.sessions, -(-LEAST_TURNS // work.turns))
    asked = replace(work, sessions=enough)
    best: tuple[float, float, float] | None = None
    grown = float("inf")
    for _ in range(rounds):
        below = asyncio.run(measure(floor, asked))
        cost = asyncio.run(measure(server, asked))
        ratio = cost.cpu / below.cpu
        best = min(best or (ratio, below.cpu, cost.cpu), (ratio, below.cpu, cost.cpu))
        grown = cost.grown if grown == float("inf") else grown  # later rounds use the memory of earlier ones
    assert best is not None
    detail = {"floor ms": best[1], "server ms": best[2]}
    yield Figure(name=f"CPU per turn, {history}: {work}", value=best[0], bar=bar, unit="×", detail=detail)
    if work.keep:
        yield Figure(name=f"memory of a session, {history}: {work}", value=grown, bar=MEGABYTES, unit="MB")


# -- processes ---------------------------------------------------------------------------------------------------------

SPREAD = Workload(sessions=16, turns=20, tokens=200, at_once=8, close=True)
"""Every request opens a connection, which any process may accept."""


def workers(bench: Bench, *, short: bool = False) -> Iterator[Figure]:
    """CPU per turn of two processes, requests that arrive at the wrong one included, against that of one."""
    engine = bench.engine()
    one, two = bench.server(engine), bench.server(engine, flags=("--workers", "2"))
    best: tuple[float, float, float] | None = None
    for _ in range(2 if short else 4):
        alone, both = asyncio.run(measure(one, SPREAD)).cpu, asyncio.run(measure(two, SPREAD)).cpu
        best = min(best or (both / alone, alone, both), (both / alone, alone, both))
    assert best is not None
    detail = {"one process, ms": best[1], "two, ms": best[2]}
    yield Figure(name=f"two processes against one: {SPREAD}", value=best[0], bar=1.3, unit="×", detail=detail)


# -- growth ------------------------------------------------------------------------------------------------------------

EARLY, LATE, WINDOW = 20, 400, 10
NOISE = 0.1
"""Milliseconds by which differences of this kind vary by themselves."""


def growth(bench: Bench, *, short: bool = False) -> Iterator[Figure]:
    """A turn's cost above a floor that reads the same request and writes the same ids, late against early."""
    engine = bench.engine()
    floor = bench.floor(engine)
    for history in HISTORIES:
        server = bench.server(engine, flags=("--history", history))
        early, late = asyncio.run(_above_floor(floor, server, 3 if short else 12))
        detail = {f"turn {EARLY} ms": early, f"turn {LATE} ms": late}
        name = f"turn {LATE} against turn {EARLY}, above the floor, {history}"
        yield Figure(name=name, value=max(late, 0.0) / max(early, NOISE), bar=1.5, unit="×", detail=detail)


async def _above_floor(floor: Served, server: Served, sessions: int) -> tuple[float, float]:
    """Milliseconds above the floor for each turn near EARLY and near LATE, over several sessions."""
    async with connections() as http:
        agents = [Agent(http, server.url, number, 200) for number in range(sessions)]
        for agent in agents:
            await agent.open()
        await asyncio.gather(*(_go(agent, EARLY - WINDOW // 2, floor) for agent in agents))  # both are warm now
        early = await _difference(agents, floor, server)
        await asyncio.gather(*(_go(agent, LATE - EARLY - WINDOW) for agent in agents))
        late = await _difference(agents, floor, server)
        for agent in agents:
            await agent.close()
    return early, late


async def _difference(agents: Sequence[Agent], floor: Served, server: Served) -> float:
    """Milliseconds that each of the next turns costs the server more than the floor, which gets them in turn."""
    before = server.cpu() - floor.cpu()
    await asyncio.gather(*(_go(agent, WINDOW, floor) for agent in agents))
    return (server.cpu() - floor.cpu() - before) * 1e3 / (len(agents) * WINDOW)


async def _go(agent: Agent, turns: int, floor: Served | None = None) -> None:
    """So many turns, each also at the floor if one is given."""
    for _ in range(turns):
        count = len(agent.messages)
        await agent.turn()
        if floor is not None:
            await agent.repeat(floor.url, count, {"x-ids": str(agent.prompt_tokens)})
        agent.hear(200)


# -- many --------------------------------------------------------------------------------------------------------------

OPEN, IN_FLIGHT, FEW = 5000, 500, 50
ENGINE_SECONDS = 0.2


def many(bench: Bench, *, short: bool = False) -> Iterator[Figure]:
    """Thousands of open sessions, hundreds of turns in flight: how a turn's time above the engine's grows with load."""
    server = bench.server(bench.engine(delay=ENGINE_SECONDS))
    few, lots = asyncio.run(_many(server, OPEN // 5 if short else OPEN))
    detail = {f"{FEW} at once, ms": few * 1e3, f"{IN_FLIGHT} at once, ms": lots * 1e3}
    grown = lots / max(few, 1e-3) / (IN_FLIGHT / FEW)
    name = f"{OPEN} sessions open, {IN_FLIGHT} turns in flight: waiting against {FEW} in flight, for each turn"
    yield Figure(name=name, value=grown, bar=1.5, unit="×", detail=detail)


async def _many(server: Served, sessions: int) -> tuple[float, float]:
    async with connections() as http:
        agents = [Agent(http, server.url, number, 20) for number in range(sessions)]
        room = asyncio.Semaphore(IN_FLIGHT)

        async def begin(agent: Agent) -> None:
            async with room:
                await agent.open()
                await agent.turn()
                agent.hear(50)

        await asyncio.gather(*map(begin, agents))
        waits = []
        for count in (FEW, IN_FLIGHT):
            took = await asyncio.gather(*(agent.turn() for agent in agents[:count]))
            for agent in agents[:count]:
                agent.hear(50)
            waits.append(max(took) - ENGINE_SECONDS)
        return waits[0], waits[1]


# -- ages --------------------------------------------------------------------------------------------------------------

LEAKED = 10.0
"""Megabytes by which the C library's own books vary."""


def ages(bench: Bench, *, short: bool = False) -> Iterator[Figure]:
    """Memory after thousands of sessions that came and went: the first third fills what is bounded, no more follows."""
    engine = bench.engine()
    count = 100 if short else 4000
    for history in HISTORIES:
        server = bench.server(engine, flags=("--history", history))
        work = Workload(sessions=count, turns=2, tokens=200, at_once=16)
        asyncio.run(measure(server, work))
        grown = asyncio.run(measure(server, replace(work, sessions=2 * count))).grown * 2 * count
        detail = {"MB in the end": server.memory()}
        name = f"memory of {2 * count} sessions that are gone, after {count} others, {history}"
        yield Figure(name=name, value=max(grown, 0.0), bar=LEAKED, unit="MB", detail=detail)
