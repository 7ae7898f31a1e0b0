"""What workers say of themselves, and how often they are asked."""

from __future__ import annotations

import asyncio
import json

import pytest

from miles_core.engine.connection import EngineReply
from miles_core.engine.facts import WorkerBook, WorkerFacts, read_facts, versions_between
from miles_core.errors import EngineUnreachable


def says(**info: object) -> EngineReply:
    return EngineReply(200, [], json.dumps(info).encode())


class Worker:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.now = 100.0
        self.reply: EngineReply | Exception = says(weight_version="1", reasoning_parser="qwen3")
        self.gate = asyncio.Event()
        self.gate.set()

    async def ask(self, url: str) -> EngineReply:
        self.asked += 1
        await self.gate.wait()
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply


async def test_a_worker_is_asked_at_most_once_a_second() -> None:
    worker = Worker()
    book = WorkerBook(worker.ask, clock=lambda: worker.now)
    for step in (0.0, 0.5, 0.4):
        worker.now += step
        assert await book.facts("w") == WorkerFacts("1", True)
    assert worker.asked == 1
    worker.reply = says(weight_version="2", reasoning_parser="qwen3")
    worker.now += 0.2
    assert await book.facts("w") == WorkerFacts("2", True)
    await book.facts("other")
    assert worker.asked == 3


async def test_turns_at_once_wait_for_one_answer_and_may_leave() -> None:
    worker = Worker()
    worker.gate.clear()
    book = WorkerBook(worker.ask, clock=lambda: worker.now)
    first, second = (asyncio.create_task(book.facts("w")) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    worker.gate.set()
    assert await second == WorkerFacts("1", True)
    assert worker.asked == 1


async def test_an_answer_from_before_an_update_is_not_believed_after_it() -> None:
    worker = Worker()
    book = WorkerBook(worker.ask, clock=lambda: worker.now)
    await book.facts("w")
    worker.reply = says(weight_version="2", reasoning_parser="qwen3")
    book.forget("w")
    assert await book.facts("w") == WorkerFacts("2", True)

    worker.now += 2
    old, worker.reply = worker.reply, says(weight_version="3", reasoning_parser="qwen3")
    gates = [asyncio.Event(), asyncio.Event()]
    answers = iter(zip(gates, (old, worker.reply), strict=True))

    async def ask(url: str) -> EngineReply:
        gate, reply = next(answers)
        await gate.wait()
        return reply

    book = WorkerBook(ask, clock=lambda: worker.now)
    waiting = asyncio.create_task(book.facts("w"))
    await asyncio.sleep(0)
    book.forget("w")  # the update came while the answer was on its way
    for gate in gates:
        gate.set()
    assert await waiting == WorkerFacts("3", True)


async def test_a_worker_that_was_removed_may_be_another_when_it_is_added_again() -> None:
    worker = Worker()
    book = WorkerBook(worker.ask, clock=lambda: worker.now)
    facts = await book.facts("w")
    book.whole_only("w", "reason")
    book.drop("w")
    assert book.streams("w", facts)
    await book.facts("w")
    assert worker.asked == 2


async def test_a_worker_that_does_not_answer_has_no_facts() -> None:
    worker = Worker()
    worker.reply = EngineUnreachable("gone")
    book = WorkerBook(worker.ask, clock=lambda: worker.now)
    facts = await book.facts("w")
    assert facts is None
    assert not book.streams("w", facts)


async def test_a_worker_whose_stream_was_not_exact_is_asked_for_whole_answers() -> None:
    worker = Worker()
    book = WorkerBook(worker.ask, clock=lambda: worker.now)
    facts = await book.facts("w")
    assert book.streams("w", facts)
    book.whole_only("w", "reason")
    assert not book.streams("w", facts)
    assert book.streams("other", facts)


@pytest.mark.parametrize(
    ("reply", "facts"),
    [
        (says(weight_version=3, tool_call_parser="qwen"), WorkerFacts("3", True)),
        (says(reasoning_parser=None, tool_call_parser=""), WorkerFacts(None, False)),
        (EngineReply(404, [], b"{}"), None),
        (EngineReply(200, [], b"<html>"), None),
        (EngineReply(200, [], b"[]"), None),
    ],
)
def test_answers(reply: EngineReply, facts: WorkerFacts | None) -> None:
    assert read_facts(reply) == facts


def test_versions_between_two_answers() -> None:
    one, two, none = WorkerFacts("1", True), WorkerFacts("2", True), WorkerFacts(None, True)
    assert versions_between(one, one) == ("1",)
    assert versions_between(one, two) == ("1", "2")
    assert versions_between(one, None) == ("1",)
    assert versions_between(none, None) == ()
