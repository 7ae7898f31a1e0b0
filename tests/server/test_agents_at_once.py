"""Many agents at once on one session, over HTTP: whatever the order, each token is trained once, with its own value."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from helpers.chat_tokenizer import IM_END, encode
from helpers.fake_engine import FakeEngine, Reply, refuses, says
from helpers.sessions import WEATHER, Message, Serve, Talk, assistant, tool, user

AGENTS, STEPS = 8, 10


class Issued:
    """An engine that never gives one log-probability twice, and remembers whose it was."""

    def __init__(self) -> None:
        self.draw = random.Random(7)
        self.count = itertools.count(1)
        self.tokens: dict[float, int] = {}
        self.lock = threading.Lock()

    def __call__(self, body: Any) -> Reply:
        with self.lock:
            kind = self.draw.random()
            if kind < 0.05:
                return refuses(503, b"{}")
            text = self.draw.choice(("Yes.", "No.", "Hm, what?"))
            ids = [*encode(f"<think>\nWell.\n</think>\n\n{text}"), IM_END]
            values = [-next(self.count) / 2**20 for _ in ids]
            self.tokens |= dict(zip(values, ids, strict=True))
            finish = "length" if kind < 0.15 else "abort" if kind < 0.2 else "stop"
            return says(text, ids=ids, log_probs=values, finish=finish)


def agent(talk: Talk, seed: int) -> Counter[int]:
    """Extends, retries, branches, rewrites and starts anew; returns how often it got each status."""
    draw = random.Random(seed)
    history: list[Message] = []
    statuses: Counter[int] = Counter()
    for _ in range(STEPS):
        asked = [*history, draw.choice((user("go"), user("on"), tool("18")))]
        if history and draw.random() < 0.2:
            asked = [*asked[: draw.randrange(len(asked))], assistant("Mine."), user("go")]
        tools = draw.choice(([WEATHER], [], None))
        answer = talk.post(asked, stream=draw.random() < 0.3, tools=tools)
        statuses[answer.status] += 1
        if draw.random() < 0.2:
            check(talk, None)
        whole = answer.status == 200 and not (answer.header("content-type") or "").startswith("text/event-stream")
        if whole and draw.random() < 0.7:
            history = [*asked, answer.message]
        elif draw.random() < 0.4:
            history = []
    return statuses


def check(talk: Talk, issued: Issued | None) -> None:
    """The samples, as they are now, hold together."""
    trained: Counter[float] = Counter()
    for sample in talk.samples().samples:
        on = sample["loss_mask"] == 1
        values = sample["rollout_log_probs"][on].tolist()
        tokens = sample["tokens"][len(sample["tokens"]) - len(on) :][on].tolist()
        trained.update(values)
        if issued is not None:
            assert tokens == [issued.tokens[value] for value in values]
        assert not sample["rollout_log_probs"][~on].any() or talk.metadata.get("tree")
    assert set(trained.values()) <= {1}


@pytest.mark.parametrize("history", ["linear", "tree"])
@pytest.mark.parametrize("matcher", ["strict", "helpers.given_matchers.Sorted"])
def test_agents_at_once(serve: Serve, engine: FakeEngine, history: str, matcher: str) -> None:
    settings = {"pick_samples": "helpers.sample_hooks.pick_all"} if history == "tree" else {}
    talk = Talk(serve(history=history, message_matcher=matcher, **settings).url)
    engine.always = issued = Issued()
    with ThreadPoolExecutor(AGENTS) as pool:
        found: Counter[int] = sum(pool.map(lambda seed: agent(talk, seed), range(AGENTS)), Counter())
    assert set(found) <= ({200, 409, 503} if history == "tree" else {200, 400, 503})
    assert found[200] > AGENTS
    check(talk, issued)
    paths = len(talk.records)
    if history == "tree":
        tree = talk.metadata["tree"]
        assert paths == len(
            next(leaf for leaf in tree["leaves"] if leaf["node_id"] == len(tree["nodes"]) - 1)["path_node_ids"]
        )
        owed = sum(node["completion_span"][1] - node["completion_span"][0] for node in tree["nodes"])
        assert sum(int(sample["loss_mask"].sum()) for sample in talk.samples().samples) == owed
    assert talk.metadata["tito_session_mismatch"] == []
