"""A path of a tree, told once more as a linear session: both must assemble to the same sample."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import fields, replace

import numpy as np

from miles_core.session.assemble import AssembledSample, assemble_path
from miles_core.session.commit import commit_turn
from miles_core.session.policy import LinearPolicy
from miles_core.session.reply import read_reply
from miles_core.session.tree import Node, path_messages
from miles_core.session.turn import Session, TurnRules, prepare_turn


def told_in_a_line(leaf: Node, rules: TurnRules) -> Session:
    """A linear session with the turns of the leaf's path: the same requests and the engine's same answers."""
    linear = replace(rules, policy=LinearPolicy())
    session = Session("linear", chat_template_kwargs={}, metadata={})
    for node in leaf.path():
        body = {**node.request, "messages": copy.deepcopy(list(path_messages(node))[:-1])}
        turn = prepare_turn(session, body, linear, rid=node.request["rid"])
        generation = read_reply(node.answer.raw, vocab_size=rules.family.tokenizer.vocab_size, engine="e")
        times = {"started": node.facts.request_timestamp, "ended": node.facts.timestamp}
        assert commit_turn(session, turn, generation, linear, **times)
    return session


def assert_same_samples(tree: Session, leaf: Node, rules: TurnRules, limits: Iterable[int | None]) -> None:
    """The leaf's sample and the linear session's are the same, bit for bit, at every limit."""
    linear = told_in_a_line(leaf, rules)
    linear.abort_marks = {len(leaf.path()) - 1} if leaf.id in tree.abort_marks else set()
    last = linear.forest.last
    assert last is not None
    for limit in limits:
        left, right = (
            assemble_path(session, node.path(), rules.family, max_seq_len=limit, replay=rules.replay)
            for session, node in ((tree, leaf), (linear, last))
        )
        assert (left is None) is (right is None)
        if left is not None and right is not None:
            assert_equal(left, right)


def assert_equal(left: AssembledSample, right: AssembledSample) -> None:
    """Every field of two samples; arrays by their bytes."""
    for each in fields(AssembledSample):
        a, b = getattr(left, each.name), getattr(right, each.name)
        if isinstance(a, np.ndarray):
            assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), each.name
        elif each.name != "status":
            assert a == b, each.name
    assert left.status == right.status or "aborted" in (left.status, right.status)
