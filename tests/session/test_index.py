"""The index of a tree's paths finds every generation that a walk over all of them finds."""

from __future__ import annotations

import random
from collections.abc import Hashable
from typing import Any

import pytest

from helpers.chat_tokenizer import VOCABULARY, chat_family
from helpers.fake_engine import says
from miles_core.session.commit import commit_turn
from miles_core.session.policy import MessageKey, TreePolicy
from miles_core.session.reply import read_reply
from miles_core.session.turn import Session, TurnRules, prepare_turn
from miles_matchers import loose_tool_call, role_content_only, strict

MATCHERS = {"strict": strict, "loose_tool_call": loose_tool_call, "role_content_only": role_content_only}
ARGUMENTS = ("{}", "", '{"a": 1}', '{"a":1.0}', '{"a": true}', "{bad")


def coarse(message: dict[str, Any]) -> Hashable:
    """Tells roles apart, and nothing else."""
    return message["role"]


def grown(matcher: Any, key: MessageKey | None, draw: random.Random) -> list[tuple[int | None, int]]:
    """A tree grown by random requests: each generation's parent, and how many messages it brought."""
    policy = TreePolicy(key=key)
    rules = TurnRules(family=chat_family(), matches=matcher.message_matches, policy=policy)
    session = Session("s", chat_template_kwargs={}, metadata={})
    seen: list[list[dict[str, Any]]] = [[]]
    for _ in range(60):
        history = [dict(message) for message in draw.choice(seen)]
        for message in history:
            if message["role"] == "assistant" and draw.random() < 0.2:
                message.update(draw.choice(({"content": None}, {"reasoning_content": None}, {"tool_calls": None})))
        asked = [*history, {"role": draw.choice(("user", "tool")), "content": draw.choice("ab")}]
        tools = draw.choice((None, [{"type": "function", "function": {"name": draw.choice("fg")}}]))
        turn = prepare_turn(session, {"messages": asked, "tools": tools}, rules, rid="r")
        calls = [("f", draw.choice(ARGUMENTS))] if draw.random() < 0.5 else []

        def same_id(reply: Any) -> None:
            for call in reply["choices"][0]["message"]["tool_calls"] or []:
                call["id"] = "c"

        reply = says(draw.choice(("", "x")), reasoning=draw.choice(("", "r")), calls=calls).with_json(same_id)
        generation = read_reply(reply.body, vocab_size=VOCABULARY, engine="e")
        assert commit_turn(session, turn, generation, rules, started=0, ended=0)
        seen.append([*asked, generation.message])
    return [(node.parent.id if node.parent else None, len(node.messages)) for node in session.forest.nodes]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", MATCHERS)
def test_a_tree_grows_alike_with_and_without(name: str, seed: int) -> None:
    matcher = MATCHERS[name]
    by_walking = grown(matcher, None, random.Random(seed))
    assert grown(matcher, matcher.message_key, random.Random(seed)) == by_walking
    assert grown(matcher, coarse, random.Random(seed)) == by_walking
    assert len({parent for parent, _ in by_walking}) > 5
