"""Tree histories: branches, retries, and one sample per leaf in which each generation is trained once."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.fake_engine import FakeEngine, says
from helpers.sessions import WEATHER, Serve, Talk, request, tool, user
from miles_core.session import wire


@pytest.fixture
def tree(serve: Serve) -> Talk:
    return Talk(serve(history="tree").url)


def samples(talk: Talk, **body: Any) -> wire.SamplesReply:
    answer = request(f"{talk.url}/samples", "POST", {"max_seq_len": None, "metadata": None, **body})
    assert answer.status == 200, answer.body
    return wire.decode(answer.body)


def test_a_retry_becomes_a_sibling_and_nothing_is_deleted(tree: Talk, engine: FakeEngine) -> None:
    engine.plays(says("One."), says("Two."))
    assert tree.post([user("u")]).status == 200
    assert tree.post([user("u")]).status == 200
    nodes = tree.metadata["tree"]["nodes"]
    assert [(n["id"], n["parent"], n["seq"], n["truncated"]) for n in nodes] == [
        (0, None, 0, False),
        (1, None, 1, False),
    ]
    assert tree.metadata["tree"]["leaves"] == [
        {"node_id": 0, "path_node_ids": [0]},
        {"node_id": 1, "path_node_ids": [1]},
    ]
    assert engine.turns[0]["input_ids"] == engine.turns[1]["input_ids"]


def test_a_request_extends_the_deepest_generation_it_agrees_with(tree: Talk, engine: FakeEngine) -> None:
    first, second, other = says("One."), says("Two."), says("Three.")
    engine.plays(first, second, other)
    tree.ask(user("u"))
    stem = list(tree.history)
    tree.ask(user("v"))
    assert tree.post([*stem, user("w")]).status == 200
    nodes = tree.metadata["tree"]["nodes"]
    assert [n["parent"] for n in nodes] == [None, 0, 0]
    checkpoint = [*engine.turns[0]["input_ids"], *first.ids]
    assert engine.turns[2]["input_ids"][: len(checkpoint)] == checkpoint
    assert nodes[1]["completion_span"] == [len(engine.turns[1]["input_ids"]), nodes[1]["num_tokens"]]


def test_a_rewritten_history_starts_a_new_root(tree: Talk, engine: FakeEngine) -> None:
    engine.plays(says("One."), says("Two."))
    tree.ask(user("u"))
    assert tree.post([user("summary of it all"), user("go on")]).status == 200
    assert [n["parent"] for n in tree.metadata["tree"]["nodes"]] == [None, None]


def test_equal_answers_attach_to_the_one_committed_last(tree: Talk, engine: FakeEngine) -> None:
    engine.plays(says("Same."), says("Same."), says("Next."))
    tree.post([user("u")])
    answer = tree.post([user("u")])
    assert tree.post([user("u"), answer.message, user("v")]).status == 200
    assert tree.metadata["tree"]["nodes"][2]["parent"] == 1


def test_extending_a_cut_off_generation_is_409_and_a_retry_is_not(tree: Talk, engine: FakeEngine) -> None:
    engine.plays(says("Cut", finish="length"), says("Whole."))
    tree.ask(user("u"))
    before = tree.state()
    refused = tree.post([*tree.history, user("v")])
    assert refused.status == 409
    assert "ended for length" in refused.error
    assert tree.state() == before
    assert tree.post([user("u")]).status == 200


def test_other_tools_start_a_branch_that_is_rendered_with_them(tree: Talk, engine: FakeEngine) -> None:
    engine.plays(says("One."), says("Two."), says("Three."))
    tree.ask(user("u"))
    stem = list(tree.history)
    assert tree.post([*stem, user("v")], tools=[WEATHER]).status == 200
    assert tree.post([*stem, user("v")]).status == 200
    assert [n["parent"] for n in tree.metadata["tree"]["nodes"]] == [None, None, 0]


def test_each_shared_generation_is_trained_in_one_sample(serve: Serve, engine: FakeEngine) -> None:
    talk = Talk(serve(history="tree", pick_samples="helpers.sample_hooks.pick_all").url)
    replies = [says("", calls=[("get_weather", "{}")]), says("A."), says("B.")]
    engine.plays(*replies)
    talk.ask(user("u"), tools=[WEATHER])
    stem = list(talk.history)
    talk.ask(tool("1"))
    assert talk.post([*stem, tool("2")]).status == 200
    reply = samples(talk, metadata={"reward": 0.5, "leaf": "mine", "note": "n"})
    assert reply.session_metadata["agent"] == {"reward": 0.5, "leaf": "mine", "note": "n"}
    first, second = sorted(reply.samples, key=lambda s: s["metadata"]["leaf"]["node_id"])
    assert int(first["loss_mask"].sum()) == len(replies[0].ids) + len(replies[1].ids)
    assert int(second["loss_mask"].sum()) == len(replies[2].ids)
    assert first["metadata"]["leaf"]["path_node_ids"] == [0, 1]
    assert {s["reward"] for s in reply.samples} == {0.5}
    assert {s["metadata"]["note"] for s in reply.samples} == {"n"}


def test_superseded_retries_are_left_out_and_roots_stay(tree: Talk, engine: FakeEngine) -> None:
    engine.plays(says("R."), says("A."), says("B."), says("Other root."))
    tree.ask(user("u"))
    stem = list(tree.history)
    tree.post([*stem, user("v")])
    tree.post([*stem, user("v")])
    tree.post([user("x")])
    kept = [s["metadata"]["leaf"]["node_id"] for s in samples(tree).samples]
    assert kept == [2, 3]


@pytest.mark.parametrize(
    ("setting", "path", "text"),
    [
        ("pick_samples", "pick_copy", "that it was not given; it may only choose"),
        ("pick_samples", "pick_twice", "returned a sample twice; it may only choose"),
        ("pick_samples", "pick_and_write", "changed a sample; it may only choose"),
        ("pick_samples", "pick_nothing_and_raise", "no taste"),
        ("postprocess_samples", "shorten", "a sample that does not hold together"),
    ],
)
def test_a_hook_that_breaks_its_contract_is_422_and_named(
    serve: Serve, engine: FakeEngine, setting: str, path: str, text: str
) -> None:
    dotted = f"helpers.sample_hooks.{path}"
    talk = Talk(serve(history="tree", **{setting: dotted}).url)
    engine.plays(says("One."), says("Two."))
    talk.ask(user("u"))
    answer = request(f"{talk.url}/samples", "POST", {"max_seq_len": None, "metadata": None})
    assert answer.status == 422
    assert text in answer.error
    assert dotted in answer.error
    talk.ask(user("v"))


def test_the_tree_has_a_limit(serve: Serve, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(history="tree")
    monkeypatch.setattr(server.service.rules.policy, "max_nodes", 2)
    talk = Talk(server.url)
    engine.plays(says("1."), says("2."))
    talk.post([user("u")])
    talk.post([user("u")])
    refused = talk.post([user("u")])
    assert refused.status == 400
    assert "2 generations" in refused.error


def test_no_turn_yet_is_an_empty_reply(tree: Talk) -> None:
    reply = samples(tree)
    assert (reply.samples, reply.empty_reason) == ([], "no_records")
