"""The tokenizers that tests use: the ids that checkpoints have, made once however many processes ask."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers.golden import golden_names, real_tokenizer, tokenizer_name
from miles_core.tito import load_tokenizer
from real_tokenizers import NAMES, cache, checkpoint

CONTROL = {
    "qwen3": {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645, "<think>": 151667},
    "qwen35": {"<|endoftext|>": 248044, "<|im_start|>": 248045, "<|im_end|>": 248046, "<think>": 248068},
    "glm47": {"<|endoftext|>": 154820, "<|user|>": 154827, "<|observation|>": 154829, "<tool_call>": 154843},
    "kimi": {"<|im_end|>": 163586, "<|im_middle|>": 163601, "<think>": 163606, "[PAD]": 163839},
    "nemotron3": {"<|im_start|>": 10, "<|im_end|>": 11, "<think>": 12, "</tool_response>": 17},
    "inkling": {"<|message_user|>": 200000, "<|content_model_end_sampling|>": 200006, "<|end_message|>": 200010},
    "minimax": {"]~b]": 200019, "[e~[": 200020, "]~!b[": 200034, "<minimax:tool_call>": 200052},
    "deepseekv4": {"<｜Assistant｜>": 128804, "<think>": 128821, "｜DSML｜": 128825},
    "deepseekv32": {"<｜Assistant｜>": 128804, "<think>": 128798, "</think>": 128799},
}
"""Ids that the models' publishers state."""


@pytest.mark.parametrize("name", NAMES)
def test_control_tokens_have_their_ids(name: str) -> None:
    tokenizer = load_tokenizer(checkpoint(name))
    assert {text: tokenizer.token_to_id(text) for text in CONTROL[name]} == CONTROL[name]
    assert [tokenizer.encode(text) for text in CONTROL[name]] == [[token] for token in CONTROL[name].values()]


def test_tags_of_a_turn_are_not_special_and_stop_tokens_are() -> None:
    for name, plain, special in (("qwen3", "<think>", "<|im_end|>"), ("glm47", "<tool_call>", "<|user|>")):
        tokenizer = real_tokenizer(name)
        assert tokenizer.token_to_id(plain) not in tokenizer.special_ids
        assert tokenizer.token_to_id(special) in tokenizer.special_ids


def test_text_has_the_ids_of_the_checkpoint() -> None:
    assert real_tokenizer("qwen3").encode("Hello, world!\n") == [9707, 11, 1879, 4894]
    assert real_tokenizer("deepseekv4").encode("Hello, world!") == [19923, 14, 2058, 3]


def test_there_is_one_for_every_family_with_vectors() -> None:
    assert {tokenizer_name(name) for name in golden_names()} == set(NAMES)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(LookupError, match="there is no tokenizer 'qwen4'; there are qwen3, qwen35, "):
        checkpoint("qwen4")


def test_those_who_ask_at_once_get_one_and_what_a_killed_process_left_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "folder", lambda: tmp_path)
    left = tmp_path / "deepseekv4.unfinished"
    left.mkdir()
    (left / "tokenizer.json").write_text('{"version": ')
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(checkpoint, ["deepseekv4"] * 3))
    assert made == [tmp_path / "deepseekv4"] * 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deepseekv4", "deepseekv4.lock"]
    assert load_tokenizer(made[0]).encode("Hi") == real_tokenizer("deepseekv4").encode("Hi")


def test_a_recipe_that_fails_says_why_and_leaves_nothing_to_be_taken_for_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "folder", lambda: tmp_path)
    monkeypatch.setattr(cache, "HERE", tmp_path / "no" / "code")
    with pytest.raises(RuntimeError, match=r"cannot make the tokenizer qwen3:\n.*No module named real_tokenizers"):
        checkpoint("qwen3")
    assert not (tmp_path / "qwen3").exists()
