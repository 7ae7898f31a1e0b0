"""The conversations that every cycle drives, each in a session of its own.

They go through every way in which a turn can follow another: each role the family may append, calls and their
results, retries, branches, streamed turns, turns that are cut off.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles_core.testing.verify_session.talk import (
    CALLED,
    CALLED_TWICE,
    CUT,
    SAMPLES,
    STREAMED,
    Missed,
    Run,
    Talk,
    Want,
    appended_event,
    results_of,
)
from miles_core.types import Message

if TYPE_CHECKING:
    from miles_core.testing.verify_session.client import SessionClient
    from miles_core.testing.verify_session.results import Place

RETRIED, RESENT, BRANCHED = "retry", "re-sent history", "branches"
WENT_ON, NOT_EXTENDED = "on after a cut", "refused after a cut"
BRANCHES = 3


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What a conversation needs: sessions of one server, questions, and what its history and family allow."""

    run: Run
    client: SessionClient
    place: Place
    rng: random.Random

    @property
    def tree(self) -> bool:
        """Whether histories are trees."""
        return self.place.history == "tree"

    @property
    def roles(self) -> tuple[str, ...]:
        """What the family may append."""
        return self.run.bound.family.allowed_append_roles

    def session(self, *, quiet: bool = True) -> Talk:
        """A session, deleted at the end of its `async with`; one that is not quiet may think."""
        return Talk(self.run, self.client, self.place, quiet=quiet)

    def question(self) -> Message:
        """A user's message that makes a model call its calculator."""
        one, two = self.rng.randint(2, 99), self.rng.randint(2, 99)
        return {"role": "user", "content": f"What is {one} {self.rng.choice('+-*')} {two}?"}


async def calls(scene: Scene) -> None:
    """A call and its result, then a second question; where calls can be forced, two calls at once."""
    async with scene.session() as talk:
        called = await talk.ask(None, scene.question(), want=Want.CALL)
        answered = await talk.ask(called, *results_of(called))
        last = await talk.ask(answered, *results_of(answered), scene.question())
        if talk.forced:
            both = await talk.ask(last, *results_of(last), scene.question(), want=Want.CALLS)
            last = await talk.ask(both, *results_of(both))
        await talk.close(last)


async def roles(scene: Scene) -> None:
    """Every role that can be appended, and a message of each."""
    said: Mapping[str, Message] = {
        "system": {"role": "system", "content": "Use the calculator for every question."},
        "developer": {"role": "developer", "content": "Keep to the tools you have."},
        "assistant": {"role": "assistant", "content": "Let me see what comes next."},
    }
    async with scene.session() as talk:
        system: Message = {"role": "system", "content": "You solve arithmetic. Use the calculator."}
        turn = await talk.ask(None, *([system] if "system" in scene.roles else []), scene.question())
        for role in scene.roles:
            message = said.get(role)
            if message is not None:
                turn = await talk.ask(turn, *results_of(turn), message, scene.question())
            elif role == "user":
                turn = await talk.ask(turn, *results_of(turn), scene.question(), scene.question())
        await talk.close(turn)


async def retries(scene: Scene) -> None:
    """The first turn again, a later turn again, another message in its place, and the exact history once more."""
    async with scene.session() as talk:
        first = scene.question()
        await talk.ask(None, first)
        turn = await talk.ask(None, first, event=RETRIED)
        second = [*results_of(turn), scene.question()]
        await talk.ask(turn, *second)
        await talk.ask(turn, *second, event=RETRIED)
        other = await talk.ask(turn, *results_of(turn), scene.question(), event=RETRIED)
        third = await talk.ask(other, *results_of(other), scene.question())
        last = await talk.ask(third, want=Want.ANY, event=RESENT)
        await talk.close(last)


async def branches(scene: Scene) -> None:
    """Several turns at once: from one generation in a tree, in sessions of their own where histories are linear."""
    if not scene.tree:
        await asyncio.gather(*(_alone(scene) for _ in range(BRANCHES)))
        return
    async with scene.session() as talk:
        root = await talk.ask(None, scene.question())
        before = results_of(root)
        asked = [talk.ask(root, *before, scene.question(), alone=False, event=BRANCHED) for _ in range(BRANCHES)]
        turn = root
        for branch in await asyncio.gather(*asked):
            turn = await talk.ask(branch, *results_of(branch), scene.question())
        await talk.close(turn)


async def _alone(scene: Scene) -> None:
    async with scene.session() as talk:
        turn = await talk.ask(None, scene.question(), event=BRANCHED)
        await talk.close(await talk.ask(turn, *results_of(turn), scene.question()))


async def streams(scene: Scene) -> None:
    """A call and an answer as events, and a turn that is not streamed behind them."""
    async with scene.session() as talk:
        called = await talk.ask(None, scene.question(), want=Want.CALL, stream=True)
        answered = await talk.ask(called, *results_of(called), stream=True)
        await talk.close(await talk.ask(answered, *results_of(answered), scene.question()))


async def cuts(scene: Scene) -> None:
    """A turn that is cut off: a linear session goes on behind it, a tree refuses and tries again."""
    async with scene.session() as talk:
        first = await talk.ask(None, scene.question())
        asked = [*results_of(first), scene.question()]
        cut = await talk.ask(first, *asked, want=Want.CUT)
        if scene.tree:
            await talk.refused(cut, scene.question(), status=409, event=NOT_EXTENDED)
            last = await talk.ask(first, *asked)
        else:
            last = await talk.ask(cut, *results_of(cut), scene.question(), event=WENT_ON)
        await talk.close(last)


async def free(scene: Scene) -> None:
    """What the model says by itself, thinking as it does by default."""
    async with scene.session(quiet=False) as talk:
        want = Want.END if scene.tree else Want.ANY
        turn = await talk.ask(None, scene.question(), want=Want.ANY)
        for _ in range(2):
            if scene.tree and turn.answer.finish == "length":
                break
            turn = await talk.ask(turn, *(results_of(turn) or [scene.question()]), want=want)
        await talk.close(turn)


Conversation = Callable[[Scene], Awaitable[None]]

CONVERSATIONS: Mapping[str, Conversation] = {
    "calls": calls,
    "roles": roles,
    "retries": retries,
    "branches": branches,
    "streams": streams,
    "cuts": cuts,
    "free": free,
}


def events(roles_: tuple[str, ...], *, tree: bool) -> tuple[str, ...]:
    """Everything that has to happen in a history, in the order it is shown."""
    cut = NOT_EXTENDED if tree else WENT_ON
    named = (CALLED, CALLED_TWICE, RETRIED, RESENT, BRANCHED, STREAMED, CUT, cut, SAMPLES)
    return (*(appended_event(role) for role in roles_), *named)


__all__ = ["CONVERSATIONS", "Missed", "Scene", "events"]
