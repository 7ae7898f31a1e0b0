"""Routing replay: rows that carry a running number arrive at the tokens they belong to."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.chat_tokenizer import write_checkpoint
from helpers.fake_engine import FakeEngine, Reply, says
from helpers.sessions import Json, Serve, Talk, request, user
from miles_core.errors import ConfigError
from miles_core.server.parts import replay_of
from miles_core.server.settings import ServerSettings

LAYERS, TOPK = 2, 3


def rows(start: int, stop: int, layers: int = LAYERS) -> str:
    """Rows `start … stop-1`, each filled with its own number."""
    values = np.repeat(np.arange(start, stop, dtype="<i4"), layers * TOPK)
    return base64.b64encode(values.tobytes()).decode()


def routed(text: str, key: str = "routed_experts", **meta: Any) -> Any:
    """A reply with as many rows as its request asks for."""

    def answer(body: Json) -> Reply:
        reply = says(text)
        start = body.get("routed_experts_start_len", 0)
        total = len(body["input_ids"]) + len(reply.ids)

        def add(data: Json) -> None:
            data["choices"][0]["meta_info"].update({key: rows(start, total - 1), **meta})

        return reply.with_json(add)

    return answer


@pytest.fixture
def moe(tmp_path: Path) -> Path:
    checkpoint = write_checkpoint(tmp_path / "moe")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "num_hidden_layers": LAYERS}))
    return checkpoint


def assert_running(found: Any, tokens: int) -> None:
    assert found.shape == (tokens - 1, LAYERS, TOPK)
    assert found.dtype == np.int32
    assert (found == np.arange(tokens - 1, dtype=np.int32)[:, None, None]).all()


@pytest.mark.parametrize("incremental", [False, True])
def test_every_row_belongs_to_its_token_through_a_retry_and_every_cut(
    serve: Serve, engine: FakeEngine, moe: Path, incremental: bool
) -> None:
    talk = Talk(serve(checkpoint=str(moe), routing_replay=True, incremental_replay=incremental).url)
    engine.plays(*[routed(text) for text in ("One.", "Lost.", "Two.", "Three.")])
    talk.ask(user("a"))
    stem = list(talk.history)
    talk.ask(user("b"))
    talk.history = stem
    talk.ask(user("c"))
    talk.ask(user("d"))
    first, lost, second, third = engine.turns
    assert all(turn["return_routed_experts"] is True for turn in engine.turns)
    if incremental:
        held = len(second["input_ids"])
        assert first["routed_experts_start_len"] == 0
        assert lost["routed_experts_start_len"] == second["routed_experts_start_len"] < held
        assert third["routed_experts_start_len"] > second["routed_experts_start_len"]
    whole = talk.samples().samples[0]
    assert_running(whole["rollout_routed_experts"], len(whole["tokens"]))
    for limit in range(len(first["input_ids"]) + 1, len(whole["tokens"]) + 2):
        for sample in talk.samples(limit).samples:
            assert_running(sample["rollout_routed_experts"], len(sample["tokens"]))
    answer = json.loads(talk.state("last"))["records"][0]["response"]
    assert "routed_experts" in answer["choices"][0]["meta_info"]


def test_rows_do_not_reach_the_agent(serve: Serve, engine: FakeEngine, moe: Path) -> None:
    talk = Talk(serve(checkpoint=str(moe), routing_replay=True).url)
    engine.plays(routed("One."))
    assert "routed_experts" not in talk.ask(user("a")).json["choices"][0]["meta_info"]


def test_a_wrong_count_of_rows_is_422_with_the_numbers(serve: Serve, engine: FakeEngine, moe: Path) -> None:
    talk = Talk(serve(checkpoint=str(moe), routing_replay=True).url)
    engine.plays(says("One.", meta={"routed_experts": rows(0, 5)}))
    talk.ask(user("a"))
    answer = request(f"{talk.url}/samples", "POST", {})
    assert answer.status == 422
    assert "turn 0: routed_experts has 30 values" in answer.error


def test_a_gap_ends_the_sample_when_rows_are_whole_and_is_422_when_incremental(
    serve: Serve, engine: FakeEngine, moe: Path
) -> None:
    for incremental in (False, True):
        talk = Talk(serve(checkpoint=str(moe), routing_replay=True, incremental_replay=incremental).url)
        engine.plays(routed("One."), says("Two."))
        talk.ask(user("a"))
        talk.ask(user("b"))
        answer = request(f"{talk.url}/samples", "POST", {})
        if incremental:
            assert answer.status == 422
            assert "turn 1 has no routing rows" in answer.error
        else:
            assert len(talk.samples().samples[0]["weight_versions"]) == 1


def test_the_indexer_s_rows_come_with_their_own_layer_count(serve: Serve, engine: FakeEngine, moe: Path) -> None:
    talk = Talk(serve(checkpoint=str(moe), indexer_replay=True).url)
    engine.plays(routed("One.", "indexer_topk", indexer_topk_num_layers=LAYERS), says("Two."))
    talk.ask(user("a"))
    assert engine.turns[0]["return_indexer_topk"] is True
    sample = talk.samples().samples[0]
    assert_running(sample["rollout_indexer_topk"], len(sample["tokens"]))
    refused = talk.post([*talk.history, user("b")])
    assert refused.status == 502
    assert "indexer_topk" in refused.error


def test_an_adapter_is_named_in_every_turn(serve: Serve, engine: FakeEngine) -> None:
    talk = Talk(serve(lora_path="mine").url)
    engine.plays(says("One."))
    talk.ask(user("a"))
    assert engine.turns[0]["lora_path"] == "mine"


def test_replay_needs_the_model_s_layer_count() -> None:
    settings = ServerSettings(checkpoint="c", tito_model="qwen3", engine_urls=("http://e",), routing_replay=True)
    with pytest.raises(ConfigError, match=r"needs num_hidden_layers in the config\.json of c"):
        replay_of(settings, {})


@pytest.mark.parametrize("incremental", [False, True])
def test_every_leaf_of_a_tree_has_its_rows(serve: Serve, engine: FakeEngine, moe: Path, incremental: bool) -> None:
    server = serve(
        checkpoint=str(moe),
        history="tree",
        pick_samples="helpers.sample_hooks.pick_all",
        routing_replay=True,
        incremental_replay=incremental,
    )
    talk = Talk(server.url)
    engine.plays(*[routed(text) for text in ("Stem.", "Left, longer than the other.", "Right.")])
    talk.ask(user("a"))
    stem = list(talk.history)
    talk.ask(user("b"))
    assert talk.post([*stem, user("c")]).status == 200
    samples = talk.samples().samples
    assert len(samples) == 2
    for sample in samples:
        assert_running(sample["rollout_routed_experts"], len(sample["tokens"]))


def test_a_picker_that_writes_to_rows_is_422_and_changes_nothing(serve: Serve, engine: FakeEngine, moe: Path) -> None:
    path = "helpers.sample_hooks.pick_and_write_rows"
    talk = Talk(serve(checkpoint=str(moe), history="tree", pick_samples=path, routing_replay=True).url)
    engine.plays(routed("One."))
    talk.ask(user("a"))
    for _ in range(2):
        answer = request(f"{talk.url}/samples", "POST", {})
        assert answer.status == 422
        assert path in answer.error
        assert "read-only" in answer.error


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut alike"])
def test_the_indexer_s_rows_may_come_whole_or_cut_as_the_experts_are(
    serve: Serve, engine: FakeEngine, moe: Path, cut: bool
) -> None:
    def both(text: str) -> Any:
        def answer(body: Json) -> Reply:
            start, reply = body["routed_experts_start_len"], says(text)
            total = len(body["input_ids"]) + len(reply.ids)
            meta = {"routed_experts": rows(start, total - 1), "indexer_topk_num_layers": 1}
            meta["indexer_topk"] = rows(start if cut else 0, total - 1, layers=1)
            return reply.with_json(lambda data: data["choices"][0]["meta_info"].update(meta))

        return answer

    talk = Talk(serve(checkpoint=str(moe), routing_replay=True, indexer_replay=True, incremental_replay=True).url)
    engine.plays(both("One."), both("Two."), both("Three."))
    for text in "abc":
        talk.ask(user(text))
    sample = talk.samples().samples[0]
    assert_running(sample["rollout_routed_experts"], len(sample["tokens"]))
    indexer = sample["rollout_indexer_topk"]
    assert indexer.shape == (len(sample["tokens"]) - 1, 1, TOPK)
    assert (indexer == np.arange(len(indexer), dtype=np.int32)[:, None, None]).all()


ODD_ROWS = {
    "a number": (5, "base64 text and a layer count are needed"),
    "no base64": ("AAA", "routed_experts has 0 values"),
    "other characters": ("é" * 16, "which do not make"),
    "not whole numbers": (base64.b64encode(b"abc").decode(), "has 0 values"),
    "empty": ("", "has 0 values"),
}


@pytest.mark.parametrize("name", ODD_ROWS)
@pytest.mark.parametrize("history", ["linear", "tree"])
def test_rows_that_cannot_be_read_are_422_and_nothing_is_lost(
    serve: Serve, engine: FakeEngine, moe: Path, history: str, name: str
) -> None:
    value, text = ODD_ROWS[name]
    talk = Talk(serve(checkpoint=str(moe), routing_replay=True, history=history).url)
    engine.plays(says("One.", meta={"routed_experts": value}), routed("Two."))
    talk.ask(user("a"))
    answer = request(f"{talk.url}/samples", "POST", {})
    assert answer.status == 422
    assert f"turn 0: {text}" in answer.error or text in answer.error
    assert talk.records[0]["response"]["choices"][0]["meta_info"]["routed_experts"] == value


def test_a_gap_behind_the_end_of_a_sample_does_not_matter(serve: Serve, engine: FakeEngine, moe: Path) -> None:
    talk = Talk(serve(checkpoint=str(moe), routing_replay=True, incremental_replay=True).url)
    engine.plays(routed("One."), says("Two."))
    talk.ask(user("a"))
    length = len(talk.metadata["accumulated_token_ids"])
    talk.ask(user("b"))
    assert request(f"{talk.url}/samples", "POST", {}).status == 422
    sample = talk.samples(length).samples[0]
    assert_running(sample["rollout_routed_experts"], length)
