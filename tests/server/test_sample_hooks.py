"""Sample hooks of tree histories, by name or path: a hook that breaks its contract is 422 naming it."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.fake_engine import FakeEngine, says
from helpers.sessions import Serve, Talk, request, user
from miles_core.session import wire

HOOKS = "helpers.sample_hooks"


def asked(serve: Serve, engine: FakeEngine, **settings: Any) -> Talk:
    """A session with a stem and two branches, over hooks given by path."""
    talk = Talk(serve(history="tree", **{key: f"{HOOKS}.{name}" for key, name in settings.items()}).url)
    engine.plays(says("Stem."), says("Left."), says("Right."))
    talk.ask(user("u"))
    stem = list(talk.history)
    talk.ask(user("v"))
    assert talk.post([*stem, user("w")]).status == 200
    return talk


def samples(talk: Talk, **body: Any) -> list[dict[str, Any]]:
    answer = request(f"{talk.url}/samples", "POST", body)
    assert answer.status == 200, answer.body
    return wire.decode(answer.body).samples


def nodes(found: list[dict[str, Any]]) -> list[int]:
    return [sample["metadata"]["leaf"]["node_id"] for sample in found]


def test_the_defaults(serve: Serve, engine: FakeEngine) -> None:
    assert nodes(samples(asked(serve, engine))) == [2]


def test_a_picker_chooses_and_orders(serve: Serve, engine: FakeEngine) -> None:
    assert nodes(samples(asked(serve, engine, pick_samples="pick_all"))) == [1, 2]
    assert nodes(samples(asked(serve, engine, pick_samples="pick_backwards"))) == [2, 1]
    assert nodes(samples(asked(serve, engine, pick_samples="pick_and_change_the_metadata"))) == [1, 2]


def test_what_no_picker_chose_is_an_empty_reply(serve: Serve, engine: FakeEngine) -> None:
    assert samples(asked(serve, engine, pick_samples="pick_none")) == []


def test_a_postprocessor_may_clear_cut_and_rename(serve: Serve, engine: FakeEngine) -> None:
    for name in ("untrained", "shortened_by_one", "of_its_own", "arrays"):
        found = samples(asked(serve, engine, pick_samples="pick_all", postprocess_samples=name))
        assert len(found) == 2
        trained = [int(sample["loss_mask"].sum()) for sample in found]
        assert all(trained) is (name != "untrained"), name


@pytest.mark.parametrize("key", ["accumulated_token_ids", "tito_session_mismatch", "leaf"])
def test_an_agent_s_metadata_does_not_replace_the_server_s(serve: Serve, engine: FakeEngine, key: str) -> None:
    talk = asked(serve, engine)
    (sample,) = samples(talk, metadata={key: "forged", "note": 1})
    assert sample["metadata"].get(key) != "forged"
    assert sample["metadata"]["note"] == 1
    assert sample["reward"] is None


BROKEN = {
    ("pick_samples", "answer_later"): "returned coroutine, expected a list",
    ("pick_samples", "return_nothing"): "returned NoneType, expected a list",
    ("pick_samples", "return_a_tuple"): "returned tuple, expected a list",
    ("pick_samples", "raise_ours"): "HistoryError: not these",
    ("pick_samples", "leave_the_program"): "pick_samples",
    ("pick_samples", "give_strangers"): "that it was not given",
    ("pick_samples", "pick_and_change_tokens"): "changed a sample; it may only choose",
    ("postprocess_samples", "answer_later"): "returned coroutine, expected a list of Sample",
    ("postprocess_samples", "return_nothing"): "returned NoneType, expected a list of Sample",
    ("postprocess_samples", "raise_ours"): "HistoryError: not these",
    ("postprocess_samples", "leave_the_program"): "postprocess_samples",
    ("postprocess_samples", "give_strangers"): "a list that holds str",
    ("postprocess_samples", "no_mask"): "without loss_mask",
    ("postprocess_samples", "no_log_probs"): "without rollout_log_probs",
    ("postprocess_samples", "reward_nan"): "NaN or Infinity",
    ("postprocess_samples", "reward_object"): "does not fit into JSON",
    ("postprocess_samples", "metadata_surrogate"): "does not fit into JSON",
    ("postprocess_samples", "metadata_list"): "metadata is list, expected dict",
    ("postprocess_samples", "response_none"): "response is NoneType, expected str",
    ("postprocess_samples", "status_unknown"): "'done' is not a valid SampleStatus",
    ("postprocess_samples", "versions_numbers"): "weight_versions",
    ("postprocess_samples", "rows_too_many"): "rollout_routed_experts has 1 rows",
    ("postprocess_samples", "log_probs_nan"): "not finite",
    ("postprocess_samples", "mask_two"): "other than 0 and 1",
    ("postprocess_samples", "mask_half"): "loss_mask: values do not fit uint8",
    ("postprocess_samples", "token_half"): "tokens: values do not fit int64",
    ("postprocess_samples", "token_huge"): "tokens: values do not fit int64",
    ("postprocess_samples", "train_all"): "which the engine did not sample there",
    ("postprocess_samples", "make_up_log_probs"): "which the engine did not sample there",
    ("postprocess_samples", "other_tokens"): "which the engine did not sample there",
}


@pytest.mark.parametrize(("setting", "name"), BROKEN)
def test_a_hook_that_breaks_its_contract_is_422_and_the_server_lives_on(
    serve: Serve, engine: FakeEngine, setting: str, name: str
) -> None:
    talk = asked(serve, engine, **{"pick_samples": "pick_all", setting: name})
    before = talk.state()
    answer = request(f"{talk.url}/samples", "POST", {"metadata": {"reward": 1}})
    assert answer.status == 422, answer.body
    assert BROKEN[setting, name] in answer.error
    assert f"{HOOKS}.{name}" in answer.error
    assert setting in answer.error
    assert talk.state() == before
    talk.ask(user("x"))
