"""Samples: exactly what was sampled is trained on, with the log-probability that came with it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from helpers.chat_tokenizer import END_OF_TEXT, IM_END, NEWLINE, decode, encode
from helpers.fake_engine import FakeEngine, Reply, says
from helpers.sessions import WEATHER, Serve, Talk, request, tool, user

Sample = dict[str, Any]


def lists(sample: Sample) -> tuple[list[int], list[int], list[float]]:
    """Tokens, and mask and log-probs with zeros for the prompt in front."""
    tokens, mask = sample["tokens"].tolist(), sample["loss_mask"].tolist()
    values = sample["rollout_log_probs"].tolist()
    assert len(mask) == len(values) == sample["response_length"] <= len(tokens)
    front = len(tokens) - len(mask)
    return tokens, [0] * front + mask, [0.0] * front + values


def check(sample: Sample, prompts: Sequence[list[int]], replies: Sequence[Reply], length: int | None = None) -> None:
    """The sample is the last checkpoint, masked where the replies' ids stand, up to a length."""
    tokens, mask, values = lists(sample)
    wanted = [*prompts[-1], *replies[-1].ids]
    sampled: dict[int, float] = {}
    for prompt, reply in zip(prompts, replies, strict=True):
        sampled.update({len(prompt) + at: value for at, value in enumerate(reply.log_probs)})
    size = len(wanted) if length is None else min(length, len(wanted))
    assert tokens == wanted[:size]
    assert mask == [int(at in sampled) for at in range(size)]
    assert values == [sampled.get(at, 0.0) for at in range(size)]
    assert sample["response"] == decode(wanted[len(prompts[0]) : size])


@pytest.fixture
def three_turns(talk: Talk, engine: FakeEngine) -> tuple[Talk, list[list[int]], list[Reply]]:
    replies = [
        says("", calls=[("get_weather", '{"city": "Paris"}')], meta={"weight_version": 3}),
        says("Warm.", meta={"spec_num_correct_drafts": 4, "spec_num_proposed_drafts": 9, "spec_verify_ct": 2}),
        says("Bye."),
    ]
    engine.plays(*replies)
    for message in (user("Weather?"), tool("18"), user("Thanks")):
        talk.ask(message, tools=[WEATHER])
    return talk, [turn["input_ids"] for turn in engine.turns], replies


def test_a_sample_of_three_turns(three_turns: tuple[Talk, list[list[int]], list[Reply]]) -> None:
    talk, prompts, replies = three_turns
    reply = talk.samples()
    (sample,) = reply.samples
    check(sample, prompts, replies)
    assert sample["status"] == "completed"
    assert sample["weight_versions"] == ["3", "w1", "w1"]
    assert sample["prefix_cache_info"] == {"cached_tokens": 9, "total_prompt_tokens": 30}
    assert sample["spec_info"] == {
        "spec_accept_token_num": 4,
        "spec_draft_token_num": 9,
        "spec_verify_ct": 2,
        "completion_token_num": sum(len(r.ids) for r in replies),
    }
    assert sample["rollout_routed_experts"] is None
    assert sample["rollout_indexer_topk"] is None
    rows = sample["metadata"]["lifecycle"]
    assert [row["turn"] for row in rows] == [0, 1, 2]
    assert [row["prev_t1"] for row in rows] == [None, rows[0]["t1"], rows[1]["t1"]]
    assert all(row["t0"] <= row["t1"] for row in rows)
    assert reply.session_metadata == talk.metadata
    assert reply.empty_reason is None


def test_every_limit(three_turns: tuple[Talk, list[list[int]], list[Reply]]) -> None:
    talk, prompts, replies = three_turns
    ends = [len(p) + len(r.ids) for p, r in zip(prompts, replies, strict=True)]
    before = talk.state()
    for limit in range(1, ends[-1] + 2):
        got = talk.samples(limit)
        turns = sum(1 for prompt in prompts if len(prompt) < limit)
        if not turns:
            assert (got.samples, got.empty_reason) == ([], "all_truncated"), limit
            continue
        (sample,) = got.samples
        whole = limit >= ends[turns - 1]
        check(sample, prompts[:turns], replies[:turns], limit)
        assert sample["status"] == ("completed" if whole else "truncated"), limit
        assert len(sample["weight_versions"]) == turns
        assert len(sample["tokens"]) <= limit
    assert talk.state() == before


def test_no_turn_yet(talk: Talk) -> None:
    reply = talk.samples()
    assert (reply.samples, reply.empty_reason) == ([], "no_records")
    for raw in (b"", b"{}", b'{"max_seq_len": null}'):
        assert request(f"{talk.url}/samples", "POST", raw=raw).status == 200


def test_a_turn_cut_for_length_ends_the_sample(talk: Talk, engine: FakeEngine) -> None:
    replies = [says("one"), says("two", finish="length", ids=encode("<think>\nWell.\n</think>\n\ntw")), says("three")]
    engine.plays(*replies)
    for text in ("a", "b"):
        talk.ask(user(text))
    prompts = [turn["input_ids"] for turn in engine.turns]
    (sample,) = talk.samples().samples
    check(sample, prompts, replies[:2])
    assert sample["status"] == "truncated"
    talk.ask(user("c"))
    (sample,) = talk.samples().samples
    check(sample, prompts, replies[:2])
    assert sample["status"] == "truncated"


@pytest.mark.parametrize("ending", [[IM_END], [], [END_OF_TEXT], [IM_END, NEWLINE]], ids=["end", "none", "eot", "both"])
def test_the_end_of_a_turn_stands_once_and_is_trained_on_if_sampled(
    talk: Talk, engine: FakeEngine, ending: list[int]
) -> None:
    body = encode("<think>\nHm.\n</think>\n\nYes")
    first, second = says("Yes", ids=[*body, *ending]), says("No")
    engine.plays(first, second)
    talk.ask(user("a"))
    talk.ask(user("b"))
    prompts = [turn["input_ids"] for turn in engine.turns]
    start = len(prompts[0]) + len(body)
    boundary = prompts[1][start : prompts[1].index(151_644, start)]
    assert boundary.count(IM_END) == 1
    assert boundary[-1] == NEWLINE
    assert boundary[: len(ending)] == ending
    (sample,) = talk.samples().samples
    check(sample, prompts, [first, second])
    assert not [m for m in talk.metadata["tito_session_mismatch"] if m["type"] == "special_token_type"]


def test_a_turn_that_was_retried_is_not_in_the_sample(talk: Talk, engine: FakeEngine) -> None:
    kept, lost, better = says("kept"), says("lost"), says("better")
    engine.plays(kept, lost, better)
    talk.ask(user("a"))
    after_one = list(talk.history)
    talk.ask(user("b"))
    talk.history = after_one
    talk.ask(user("b"))
    prompts = [turn["input_ids"] for turn in engine.turns]
    assert prompts[1] == prompts[2]
    check(talk.samples().samples[0], [prompts[0], prompts[2]], [kept, better])


def test_random_ids_survive(talk: Talk, engine: FakeEngine) -> None:
    """Whatever ids come, they are sent back, trained on, and never made from text again."""
    chance = random.Random(5)
    vocabulary = [*range(256), *range(151_643, 151_669)]
    replies = [says(f"turn {n}", ids=chance.choices(vocabulary, k=1 + n * 7)) for n in range(5)]
    engine.plays(*replies)
    for n in range(5):
        talk.ask(user(f"ask {n}"))
    prompts = [turn["input_ids"] for turn in engine.turns]
    for prompt, reply, following in zip(prompts, replies, prompts[1:], strict=False):
        assert following[: len(prompt) + len(reply.ids)] == [*prompt, *reply.ids]
    check(talk.samples().samples[0], prompts, replies)
    assert isinstance(talk.metadata["tito_session_mismatch"], list)


def test_log_probs_are_kept_exactly(talk: Talk, engine: FakeEngine) -> None:
    values = [0, -0.0, -1e-320, -1.7976931348623157e308, -0.1, -3]
    reply = says("x", ids=[64, 65, 66, 67, 68, IM_END], log_probs=values)
    engine.plays(reply)
    talk.ask(user("u"))
    got = talk.samples().samples[0]["rollout_log_probs"]
    assert np.array_equal(got, np.array(values, dtype=np.float64))


@pytest.mark.parametrize("count", [None, "7", True, -5, 1e30, 2**64 - 1, [], {}])
def test_counters_that_cannot_be_true_count_as_nothing(talk: Talk, engine: FakeEngine, count: Any) -> None:
    engine.plays(says(meta={"cached_tokens": count, "spec_verify_ct": count, "weight_version": count}))
    talk.ask(user("u"))
    sample = talk.samples().samples[0]
    assert sample["prefix_cache_info"]["cached_tokens"] == 0
    assert sample["spec_info"]["spec_verify_ct"] == 0
    assert len(sample["weight_versions"]) == 1


SPANS = {
    "none": ({"weight_version": "7"}, ["7"]),
    "one": ({"weight_version": "7", "weight_versions": [{"version": "7", "start": 0, "end": 5}]}, ["7"]),
    "an update inside": (
        {"weight_version": "8", "weight_versions": [{"version": "7", "start": 0, "end": 2},
                                                    {"version": "8", "start": 2, "end": 9}]},
        ["7", "8"],
    ),
    "two updates": (
        {"weight_version": 9, "weight_versions": [{"version": v, "start": v, "end": v + 1} for v in (7, 8, 8, 9)]},
        ["7", "8", "9"],
    ),
    "an update before the first token": (
        {"weight_version": "8", "weight_versions": [{"version": "7", "start": 0, "end": 0},
                                                    {"version": "8", "start": 0, "end": 9}]},
        ["8"],
    ),
    "back again": (
        {"weight_version": "7", "weight_versions": [{"version": v, "start": n, "end": n + 1}
                                                    for n, v in enumerate("787")]},
        ["7", "8", "7"],
    ),
    "no list": ({"weight_version": "7", "weight_versions": "7"}, ["7"]),
    "odd spans": ({"weight_version": "7", "weight_versions": [None, 3, {}, {"version": None}]}, ["7"]),
    "missing": ({"weight_version": None}, [""]),
}  # fmt: skip


@pytest.mark.parametrize("name", SPANS)
@pytest.mark.parametrize("history", ["linear", "tree"])
def test_weight_versions_are_listed_turn_by_turn(serve: Serve, engine: FakeEngine, history: str, name: str) -> None:
    talk = Talk(serve(history=history).url)
    meta, versions = SPANS[name]
    engine.plays(says("One."), says("Two.", meta=meta), says("Three."))
    for text in "abc":
        talk.ask(user(text))
    assert talk.samples().samples[0]["weight_versions"] == ["w1", *versions, "w1"]


COUNTERS = {
    "old names": {"spec_accept_token_num": 4, "spec_draft_token_num": 9, "spec_verify_ct": 2},
    "new names": {"spec_num_correct_drafts": 4, "spec_num_proposed_drafts": 9, "spec_verify_ct": 2},
    "both": {"spec_accept_token_num": 4, "spec_num_correct_drafts": 4, "spec_draft_token_num": 9,
             "spec_num_proposed_drafts": 9, "spec_verify_ct": 2},
    "old ones null": {"spec_accept_token_num": None, "spec_num_correct_drafts": 4, "spec_draft_token_num": None,
                      "spec_num_proposed_drafts": 9, "spec_verify_ct": 2.0},
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTERS)
@pytest.mark.parametrize("history", ["linear", "tree"])
def test_counters_of_speculation_and_of_the_prefix_cache_are_summed(
    serve: Serve, engine: FakeEngine, history: str, name: str
) -> None:
    talk = Talk(serve(history=history).url)
    replies = [says(text, meta={**COUNTERS[name], "cached_tokens": 5}, prompt=20) for text in ("One.", "Two.")]
    engine.plays(*replies)
    talk.ask(user("a"))
    talk.ask(user("b"))
    (sample,) = talk.samples().samples
    assert sample["spec_info"] == {
        "spec_accept_token_num": 8,
        "spec_draft_token_num": 18,
        "spec_verify_ct": 4,
        "completion_token_num": sum(len(reply.ids) for reply in replies),
    }
    assert sample["prefix_cache_info"] == {"cached_tokens": 10, "total_prompt_tokens": 40}


def test_an_empty_generation(talk: Talk, engine: FakeEngine) -> None:
    engine.plays(says("", ids=[]), says("then"))
    talk.ask(user("a"))
    reply = talk.samples()
    assert reply.samples == [] or reply.samples[0]["response_length"] == 0
    talk.ask(user("b"))
    sample = talk.samples().samples[0]
    assert sum(sample["loss_mask"].tolist()) == len(encode("<think>\nWell.\n</think>\n\nthen")) + 1


def test_a_finished_session_gives_the_same_sample_twice(serve: Serve, engine: FakeEngine) -> None:
    talk = Talk(serve().url)
    talk.ask(user("u"))
    bodies = [request(f"{talk.url}/samples", "POST").body for _ in range(2)]
    assert bodies[0] == bodies[1]
