"""What a session's history costs: attaching to a large tree, memory for each turn, assembling a long path.

Run by `make bench`; the tests hold each figure to its bar × 1.25. A request attaches to a tree of 1000 generations,
100 messages deep, in under a millisecond. A turn costs memory for what is new in it, and a sample's assembly time for
each token, however long the session is.
"""

from __future__ import annotations

import base64
import copy
import gc
import json
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.chat_tokenizer import VOCABULARY, chat_family
from helpers.fake_engine import says
from helpers.sessions import WEATHER
from miles_core.plugins import Registry
from miles_core.server.matching import guarded_key, guarded_matcher
from miles_core.session.assemble import assemble_path
from miles_core.session.commit import commit_turn
from miles_core.session.line import LineCache
from miles_core.session.policy import LinearPolicy, TreePolicy
from miles_core.session.reply import read_reply
from miles_core.session.request import key_of_tools
from miles_core.session.routing import Replay
from miles_core.session.tree import Node
from miles_core.session.turn import Session, TurnRules, prepare_turn
from miles_core.types import Message

NODES, DEPTH = 1000, 100
LAYERS, TOPK = 2, 4
TOOLS: list[dict[str, Any]] = [{**WEATHER, "note": "A long description. " * 100}]


@dataclass(frozen=True)
class Figure:
    """One measurement; lower is better."""

    name: str
    value: float
    bar: float
    unit: str


class Talk:
    """A session without a server around it."""

    def __init__(self, *, tree: bool, replay: Replay | None = None) -> None:
        matcher = Registry.discover().load("matcher", "strict")
        policy = TreePolicy(key=guarded_key(matcher)) if tree else LinearPolicy()
        self.replay = replay or Replay()
        self.rules = TurnRules(
            family=chat_family(),
            matches=guarded_matcher(matcher),
            policy=policy,
            replay=self.replay,
            lines=LineCache(budget=0),  # what is kept written has a budget of its own
        )
        self.session = Session("s", chat_template_kwargs={}, metadata={})
        self.count = 0

    def turn(self, messages: Sequence[Message], content: str = "") -> Message:
        """Commit one turn and return the answer, which differs from all others unless its content is given."""
        self.count += 1
        body = {"messages": json.loads(json.dumps(messages)), "tools": copy.deepcopy(TOOLS)}
        prepared = prepare_turn(self.session, body, self.rules, rid=str(self.count))
        reply = says(content or f"Answer {self.count}.")
        if self.replay.experts:
            start = prepared.fields.get("routed_experts_start_len", 0)
            rows = _rows(start, len(prepared.prompt) + len(reply.ids) - 1)
            reply.with_json(lambda data: data["choices"][0]["meta_info"].update(routed_experts=rows))
        generation = read_reply(reply.body, vocab_size=VOCABULARY, engine="e")
        assert commit_turn(self.session, prepared, generation, self.rules, started=0.0, ended=1.0)
        return generation.message


def _rows(start: int, stop: int) -> str:
    """Rows that tell their tokens, as an engine that repeats itself sends them."""
    return base64.b64encode(np.repeat(np.arange(start, stop, dtype="<i4"), LAYERS * TOPK).tobytes()).decode()


def user(text: object) -> Message:
    """A user's message."""
    return {"role": "user", "content": f"Message {text}. " + "Some words that agents write. " * 10}


def trunk(talk: Talk, messages: int) -> list[Message]:
    """A conversation of so many messages."""
    history: list[Message] = []
    while len(history) < messages:
        history.append(user(len(history)))
        history.append(talk.turn(history))
    return history


# -- attaching ---------------------------------------------------------------------------------------------------------


def branches_everywhere(talk: Talk) -> list[Message]:
    """A line of 100 messages with branches at every place."""
    history = trunk(talk, DEPTH)
    for number in range(NODES - talk.count):
        at = number % (DEPTH // 2) * 2
        talk.turn([*history[:at], user(f"branch {number}")])
    return history


def attempts_at_the_end(talk: Talk) -> list[Message]:
    """One line, and hundreds of answers to its last question."""
    history = trunk(talk, DEPTH - 2)
    asked = [*history, user("last")]
    answers = [talk.turn(asked) for _ in range(NODES - talk.count)]
    return [*asked, answers[len(answers) // 2]]


def attempts_at_the_start(talk: Talk) -> list[Message]:
    """Hundreds of roots with one first question, one of which goes on."""
    first = user("first")
    answers = [talk.turn([first]) for _ in range(NODES - DEPTH // 2 + 1)]
    history = [first, answers[7]]
    while len(history) < DEPTH:
        history.append(user(len(history)))
        history.append(talk.turn(history))
    return history


SHAPES: tuple[Callable[[Talk], list[Message]], ...] = (branches_everywhere, attempts_at_the_end, attempts_at_the_start)


def attaching() -> Iterator[Figure]:
    """Milliseconds to find the place of a request, the quickest of many, in trees of several shapes."""
    for shape in SHAPES:
        talk = Talk(tree=True)
        history = shape(talk)
        forest = talk.session.forest
        assert (len(forest.nodes), len(history)) == (NODES, DEPTH)
        best = float("inf")
        for _ in range(50):
            asked = json.loads(json.dumps([*history, user("next")]))
            began = time.perf_counter()
            position = talk.rules.policy.position(
                forest, asked, forest.known_tools(TOOLS, key_of_tools({"tools": TOOLS})), talk.rules.matches
            )
            best = min(best, time.perf_counter() - began)
            assert position.base is not None
            assert position.base.num_messages == DEPTH
        yield Figure(f"attach, {shape.__name__.replace('_', ' ')}", best * 1e3, 1.0, "ms")


# -- memory ------------------------------------------------------------------------------------------------------------


def memory() -> Iterator[Figure]:
    """How much more a late turn keeps than an early one, and a further attempt than its own tokens need."""
    for name, replay in (("plain", Replay()), ("whole routing rows", Replay(experts=True, layers=LAYERS))):
        talk, history = Talk(tree=True, replay=replay), list[Message]()
        early, late = (_kept(partial(_go_on, talk, history, 64)) for _ in range(2))
        yield Figure(f"memory of turns 65 to 128 against 1 to 64, {name}", late / early, 1.2, "×")
    talk = Talk(tree=True)
    asked = [user("x" * 100_000)]
    talk.turn(asked)
    each = _kept(lambda: [talk.turn(asked) for _ in range(50)]) / 50
    yield Figure("memory of one more attempt at a prompt of 100 000 characters", each / 1024, 8.0, "KiB")


def _go_on(talk: Talk, history: list[Message], turns: int) -> None:
    for _ in range(turns):
        history.append(user(len(history)))
        history.append(talk.turn(history))


def _kept(work: Callable[[], object]) -> float:
    """Bytes that are still held after the work and were not before."""
    tracemalloc.start()
    try:
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        work()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


# -- assembling --------------------------------------------------------------------------------------------------------


def assembling() -> Iterator[Figure]:
    """How much more a token of a long path takes than one of a short path, the quickest of several."""
    kinds = {
        "plain": Replay(),
        "whole routing rows": Replay(experts=True, layers=LAYERS),
        "incremental routing rows": Replay(experts=True, incremental=True, layers=LAYERS),
    }
    for name, replay in kinds.items():
        talk = Talk(tree=False, replay=replay)
        _go_on(talk, [], 200)
        last = talk.session.forest.last
        assert last is not None
        path = last.path()
        best = [float("inf")] * 2
        for _ in range(30):  # in turns, so that a busy machine slows both alike
            for which, part in enumerate((path[:50], path)):
                best[which] = min(best[which], _seconds_per_token(talk, part))
        yield Figure(f"assembling 200 turns against 50, {name}", best[1] / best[0], 1.2, "× per token")


def _seconds_per_token(talk: Talk, path: Sequence[Node]) -> float:
    began = time.thread_time()
    sample = assemble_path(talk.session, path, chat_family(), max_seq_len=None, replay=talk.replay)
    took = time.thread_time() - began
    assert sample is not None
    return took / len(sample.tokens)


def main() -> int:
    """Print the table; exit code 1 if a figure is over its bar."""
    figures = [figure for part in (attaching, memory, assembling) for figure in part()]
    width = max(len(figure.name) for figure in figures)
    for figure in figures:
        verdict = "" if figure.value <= figure.bar else "   OVER"
        print(f"{figure.name:<{width}} {figure.value:>9.3f}   bar {figure.bar:g} {figure.unit}{verdict}")
    return 1 if any(figure.value > figure.bar for figure in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
