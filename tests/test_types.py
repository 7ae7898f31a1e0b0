"""The sample's methods, as modules written for miles use them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from miles_core.types import Sample, SampleStatus


class Letters:
    """A tokenizer whose ids are characters."""

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def sample() -> Sample:
    """Two prompt tokens, four of response."""
    return Sample(
        index=3,
        prompt="ab",
        label="l",
        tokens=[97, 98, 99, 100, 101, 102],
        response="cdef",
        response_length=4,
        loss_mask=[1, 1, 0, 1],
        rollout_log_probs=[-0.1, -0.2, 0.0, -0.4],
        teacher_log_probs=[-1.0, -2.0, -3.0, -4.0],
        rollout_routed_experts=np.arange(10, dtype=np.int32).reshape(5, 1, 2),
        weight_versions=["1"],
        status=SampleStatus.COMPLETED,
        reward=1.0,
        metadata={"k": 1},
        non_generation_time=2.0,
    )


def test_stripping_cuts_every_field_and_the_text() -> None:
    cut = sample()
    cut.strip_last_output_tokens(3, Letters())
    assert (cut.tokens, cut.response, cut.response_length) == ([97, 98, 99], "c", 1)
    assert (cut.loss_mask, cut.rollout_log_probs, cut.teacher_log_probs) == ([1], [-0.1], [-1.0])
    assert cut.rollout_routed_experts.tolist() == [[[0, 1]], [[2, 3]]]
    cut.validate()


def test_stripping_all_and_nothing() -> None:
    whole = sample()
    whole.strip_last_output_tokens(0, None)
    assert whole.response == "cdef"
    whole.strip_last_output_tokens(4, Letters())
    assert (whole.tokens, whole.response, whole.loss_mask) == ([97, 98], "", [])
    whole.validate()


@pytest.mark.parametrize("count", [-1, 5])
def test_stripping_more_than_there_is_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"cannot strip {count} tokens off a response of 4"):
        sample().strip_last_output_tokens(count, Letters())


def test_a_retry_keeps_the_task_only() -> None:
    again = sample()
    again.reset_for_retry()
    fresh = Sample(index=3, prompt="ab", label="l", metadata={"k": 1})
    assert again == fresh
    again.weight_versions.append("x")
    assert Sample().weight_versions == []


@pytest.mark.parametrize(
    ("finish", "status"),
    [
        ({"type": "stop", "matched": 1}, SampleStatus.COMPLETED),
        ({"type": "length", "length": 3}, SampleStatus.TRUNCATED),
        ({"type": "abort", "message": "x"}, SampleStatus.ABORTED),
        ({"type": "surprise"}, SampleStatus.PENDING),
        (None, SampleStatus.PENDING),
    ],
)
def test_meta_info_gives_the_status(finish: object, status: SampleStatus) -> None:
    one = Sample()
    one.update_from_meta_info(SimpleNamespace(), {"finish_reason": finish})
    assert one.status is status


def test_meta_info_is_summed_over_turns() -> None:
    one = Sample()
    args = SimpleNamespace(sglang_speculative_algorithm="EAGLE")
    old = {"spec_accept_token_num": 2, "spec_draft_token_num": 5, "spec_verify_ct": 3}
    new = {"spec_num_correct_drafts": 1, "spec_num_proposed_drafts": 2}
    for number, spec in enumerate((old, new)):
        meta = {"weight_version": number, "cached_tokens": 4, "prompt_tokens": 10, "completion_tokens": 6}
        one.update_from_meta_info(args, {**meta, **spec})
    assert one.weight_versions == ["0", "1"]
    assert (one.prefix_cache_info.cached_tokens, one.prefix_cache_info.total_prompt_tokens) == (8, 20)
    spec_info = one.spec_info
    assert (spec_info.spec_accept_token_num, spec_info.spec_draft_token_num, spec_info.spec_verify_ct) == (3, 7, 3)
    assert spec_info.completion_token_num == 12
    one.update_from_meta_info(SimpleNamespace(), {"prompt_tokens": None, **old})
    assert one.spec_info.spec_verify_ct == 3, "not counted without a speculative algorithm"


def test_validation_names_the_field() -> None:
    one = sample()
    one.teacher_log_probs = [0.0]
    with pytest.raises(ValueError, match="teacher_log_probs has 1 entries, response_length is 4"):
        one.validate()


def test_a_dictionary_and_back_keeps_unknown_keys() -> None:
    one = sample()
    one.rollout_routed_experts = None
    back = Sample.from_dict({**one.to_dict(), "own": 7})
    assert back.own == 7  # type: ignore[attr-defined]
    assert back.to_dict() == {**one.to_dict(), "own": 7}
