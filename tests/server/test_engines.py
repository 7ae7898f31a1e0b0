"""Several engines behind one server: sessions keep to one, leave it when it fails or drains, and lose nothing."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import aiohttp
import pytest

from helpers.fake_engine import FakeEngine, Gate, fake_engine, says
from helpers.operator import ADMIN_KEY, Operator
from helpers.sessions import Serve, Talk, user
from helpers.stripping_router import stripping_router
from miles_core.server.app import ServerThread

Engines = list[FakeEngine]


@pytest.fixture
def engines() -> Iterator[Engines]:
    """Three engines."""
    with ExitStack() as stack:
        yield [stack.enter_context(fake_engine()) for _ in range(3)]


@pytest.fixture
def server(serve: Serve, engines: Engines) -> ServerThread:
    urls = tuple(engine.url for engine in engines)
    return serve(engine_urls=urls, admin_api_key=ADMIN_KEY, engine_health_seconds=0.05)


@pytest.fixture
def operator(server: ServerThread) -> Operator:
    return Operator(server.url)


def test_an_engine_that_stops_is_left_before_a_turn_meets_it(
    server: ServerThread, operator: Operator, engines: Engines
) -> None:
    talks = [Talk(server.url) for _ in range(6)]
    for talk in talks:
        talk.ask(user("one"))
    assert [len(engine.turns) for engine in engines] == [2, 2, 2]
    engines[0].stop()
    row = operator.until(engines[0].url, state="unhealthy")
    assert "could not be reached" in row["last_error"]
    for talk in talks:
        talk.ask(user("two"))
    assert operator.engines()[engines[0].url]["errors"] == 0, "no turn tried it"
    assert [len(engine.turns) for engine in engines[1:]] == [5, 5], "its two sessions were spread"
    engines[0].start()
    operator.until(engines[0].url, state="healthy")
    for talk in talks:
        talk.ask(user("three"))
    assert len(engines[0].turns) == 2, "sessions that moved stay where they are"
    newcomers = [Talk(server.url) for _ in range(2)]
    for talk in newcomers:
        talk.ask(user("one"))
    assert len(engines[0].turns) == 4, "and new ones come"


def test_an_engine_that_dies_in_the_middle_of_a_turn(serve: Serve, engine: FakeEngine) -> None:
    """Its listening socket and its connections go, with the turn half done; the turn is made elsewhere."""
    arrived, die = threading.Event(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def live_and_die() -> bytes:
            connection, _ = listener.accept()
            with connection:
                head = connection.recv(2**16)
                arrived.set()
                die.wait(20)
                listener.close()
                return head

        server = serve(engine_urls=(url, engine.url), admin_api_key=ADMIN_KEY, engine_health_seconds=0)
        operator = Operator(server.url)
        operator.add(engine.url, draining=True)
        dying = pool.submit(live_and_die)
        talk = Talk(server.url)
        asking = pool.submit(talk.ask, user("one"))
        assert arrived.wait(20)
        assert operator.engines()[url]["in_flight"] == 1
        operator.add(engine.url, draining=False)
        die.set()
        assert asking.result(20).message["content"] == "Fine."
        assert dying.result(20).startswith(b"POST /v1/chat/completions")
    row = operator.engines()[url]
    assert (row["errors"], row["sessions"], row["in_flight"]) == (1, 0, 0)
    assert operator.turns() == {"committed": 1}
    talk.ask(user("two"))
    assert len(talk.records) == 2


def test_draining(server: ServerThread, operator: Operator, engines: Engines) -> None:
    """Nothing new comes, what runs ends there, and its sessions go at their next turn."""
    first, second, third = engines
    operator.add(second.url, draining=True)
    operator.add(third.url, draining=True)
    talks = [Talk(server.url) for _ in range(4)]
    for talk in talks:
        talk.ask(user("one"))
    assert len(first.turns) == 4
    operator.add(second.url, draining=False)
    gate = Gate()
    first.plays(says("held", gate=gate))
    with ThreadPoolExecutor() as pool:
        asking = pool.submit(talks[0].ask, user("two"))
        assert gate.entered.wait(20)
        row = operator.add(first.url, draining=True)
        assert (row["state"], row["in_flight"], row["sessions"]) == ("draining", 1, 4)
        for talk in talks[1:]:
            talk.ask(user("two"))
        gate.open()
        assert asking.result(20).message["content"] == "held"
    row = operator.until(first.url, in_flight=0)
    assert row["sessions"] == 1
    talks[0].ask(user("three"))
    assert (len(second.turns), len(third.turns)) == (4, 0)
    assert [len(talk.records) for talk in talks] == [3, 2, 2, 2]
    assert operator.engines()[first.url]["sessions"] == 0


def test_when_all_are_draining_new_sessions_wait_and_others_go_on(
    server: ServerThread, operator: Operator, engines: Engines
) -> None:
    talk = Talk(server.url)
    talk.ask(user("one"))
    for engine in engines:
        operator.add(engine.url, draining=True)
    talk.ask(user("two"))
    late = Talk(server.url)
    refused = late.post([user("one")])
    assert (refused.status, refused.header("retry-after")) == (503, "5")
    assert "all 3 are draining" in refused.error
    operator.add(engines[0].url, draining=False)
    late.ask(user("one"))


def test_a_removed_engine_and_a_new_one(server: ServerThread, operator: Operator, engines: Engines) -> None:
    talks = [Talk(server.url) for _ in range(6)]
    for talk in talks:
        talk.ask(user("one"))
    assert operator.ask("DELETE", f"engines?url={engines[0].url}").json["removed"]["sessions"] == 2
    with fake_engine() as fresh:
        assert operator.add(fresh.url)["state"] == "healthy"
        for talk in talks:
            talk.ask(user("two"))
        assert len(fresh.turns) == 2, "the two whose engine is gone go to the least loaded"
        assert len(engines[0].turns) == 2
        fresh.stop()
        for talk in talks:
            talk.ask(user("three"))
        fresh.start()
    assert operator.turns() == {"committed": 18}


async def _talk(http: aiohttp.ClientSession, url: str, turns: int, between: Callable[[], None]) -> int:
    """One session's conversation; how many records it has at the end."""
    async with http.post(f"{url}/sessions") as response:
        session = (await response.json())["session_id"]
    messages = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"turn {turn}"})
        body = {"model": "m", "messages": messages}
        async with http.post(f"{url}/sessions/{session}/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            messages.append((await response.json())["choices"][0]["message"])
        between()
    async with http.get(f"{url}/sessions/{session}") as response:
        return len((await response.json())["records"])


@pytest.mark.slow
def test_two_hundred_sessions_while_engines_come_and_go(
    server: ServerThread, operator: Operator, engines: Engines
) -> None:
    """One is killed and started again, one drained, one added, one removed: every turn is committed once."""
    spare = FakeEngine(always=lambda body: says())
    done = Counter[str]()

    def begin() -> None:
        spare.start()
        operator.add(spare.url)

    actions: dict[int, Callable[[], object]] = {
        100: engines[0].stop,
        200: lambda: operator.add(engines[1].url, draining=True),
        300: engines[0].start,
        350: begin,
        450: lambda: operator.ask("DELETE", f"engines?url={engines[1].url}"),
    }

    async def main() -> list[int]:
        changes: list[asyncio.Future[object]] = []

        def between() -> None:
            done["turns"] += 1
            action = actions.get(done["turns"])
            if action is not None:
                changes.append(asyncio.ensure_future(asyncio.to_thread(action)))

        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=24), timeout=timeout) as http:
            found = await asyncio.gather(*(_talk(http, server.url, 3, between) for _ in range(200)))
        await asyncio.gather(*changes)
        return list(found)

    try:
        records = asyncio.run(main())
        assert records == [3] * 200
        assert operator.turns() == {"committed": 600}
        metrics = operator.metrics()
        assert metrics["miles_turn_phase_seconds_count{phase=engine}"] == 600
        assert metrics["miles_sessions_open"] == metrics["miles_sessions_created_total"] == 200
        assert metrics["miles_turns_in_flight"] == 0
        assert sum(row["in_flight"] for row in operator.engines().values()) == 0
        assert set(operator.engines()) == {engines[0].url, engines[2].url, spare.url}
    finally:
        spare.stop()


@pytest.mark.parametrize("listed", [True, False], ids=["named", "by what it drops"])
def test_a_router_in_between_is_named(serve: Serve, engine: FakeEngine, listed: bool) -> None:
    with stripping_router((engine.url,) if listed else None) as url:
        server = serve(engine_urls=(url,), admin_api_key=ADMIN_KEY, engine_health_seconds=0.05)
        operator = Operator(server.url)
        row = operator.until(url, kind="sglang-router" if listed else "a router")
        assert "give --engine the workers' own URLs" in row["router"]
        refused = Talk(server.url).post([user("one")])
    assert refused.status == 502
    assert "lacks choices[0].meta_info" in refused.error
    assert "which drops input_ids, return_meta_info and rid" in refused.error
    assert not listed or f"sglang-router in front of {engine.url}" in refused.error
