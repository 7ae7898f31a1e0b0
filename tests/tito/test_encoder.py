"""The faster encoder gives the ids of the tokenizer it stands in for, or is not used."""

from __future__ import annotations

import json
import random
import threading
import unicodedata
from array import array
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.chat_tokenizer import tokenizer_json
from helpers.golden import golden_names, golden_rows, served, tokenizer_name
from miles_core.errors import ConfigError
from miles_core.tito import load_tokenizer
from miles_core.tito.encoder import FastEncoder, composed
from miles_core.tito.tokenizer_file import TokenizerFile, UnsupportedError
from real_tokenizers import checkpoint

Data = dict[str, Any]
NAMES = sorted({tokenizer_name(name) for name in golden_names()})
every_tokenizer = pytest.mark.parametrize("name", NAMES)


@cache
def pair(name: str) -> tuple[tokenizers.Tokenizer, FastEncoder]:
    file = Path(checkpoint(name)) / "tokenizer.json"
    original = tokenizers.Tokenizer.from_file(str(file))
    return original, FastEncoder.of(file.read_bytes(), lambda: original)


def same(name: str, text: str) -> bool:
    original, fast = pair(name)
    ids = original.encode(text, add_special_tokens=False).ids
    return fast.encode(text) == ids and fast.decode(ids) == original.decode(ids, skip_special_tokens=False)


@every_tokenizer
def test_every_golden_text(name: str) -> None:
    families = [family for family in golden_names() if tokenizer_name(family) == name]
    texts = {served(row) for family in families for row in golden_rows(family) if "error" not in row}
    assert len(texts) > 50
    assert [text for text in texts if not same(name, text)] == []


PIECES = st.one_of(
    st.text(max_size=12),
    st.text(alphabet="aA1 .\n'sé中ぁ・٣\u0301\t<|/>\x01\u00a0", max_size=12),
    st.sampled_from(
        ["<|im_end|>", "<|im_", "<think>", "</think>", "<｜User｜>", "[gMASK]", "]~b]", "<|user|>", "<tool_call>"]
    ),
    st.from_regex(r"[0-9]{1,9}|[ \n\r\t]{1,9}|'(s|LL|ve|RE|ſ)", fullmatch=True),
)


@every_tokenizer
@settings(max_examples=150, deadline=None)
@given(st.lists(PIECES, max_size=12).map("".join))
def test_any_text(name: str, text: str) -> None:
    assert same(name, text)


@every_tokenizer
def test_every_token_of_the_vocabulary(name: str) -> None:
    original, fast = pair(name)
    step = 37  # a few thousand, at other places for every tokenizer
    numbers = list(range(len(name), original.get_vocab_size(with_added_tokens=True), step))
    for number in numbers:
        text = original.id_to_token(number)
        assert fast.id_to_token(number) == text
        if text is not None:
            assert fast.token_to_id(text) == original.token_to_id(text)
        assert fast.decode([number]) == original.decode([number], skip_special_tokens=False)
    words = [original.decode([number], skip_special_tokens=False) for number in numbers]
    joined = "".join(word for word in words if "\ufffd" not in word)
    assert same(name, joined)


@every_tokenizer
def test_the_tokenizer_it_is_compared_with_is_that_of_the_file(name: str) -> None:
    text = (Path(checkpoint(name)) / "tokenizer.json").read_bytes()
    assert TokenizerFile(text).tokenizer().to_str() == pair(name)[0].to_str()


@pytest.mark.parametrize("length", [0, 1, 63, 64, 500, 40_000])
def test_an_array_of_ids_is_decoded_as_a_list_is(length: int) -> None:
    original, fast = pair("qwen3")
    rng = random.Random(length)
    known = [rng.choice([151_645, 151_667, rng.randrange(151_669), 220, 11]) for _ in range(length)]
    assert fast.decode(array("i", known)) == fast.decode(known) == original.decode(known, skip_special_tokens=False)
    odd = [rng.choice([-1, -(2**31), 2**31 - 1, 151_900, 151_645, 9707]) for _ in range(length)]
    assert fast.decode(array("i", odd)) == fast.decode(odd)


def test_ids_that_do_not_exist_are_skipped() -> None:
    original, fast = pair("qwen3")
    ids = [9707, 999_999_999, 151_645, 151_900, 11]
    assert fast.decode(ids) == original.decode(ids, skip_special_tokens=False)
    assert fast.id_to_token(999_999_999) is None
    assert fast.token_to_id("no such token ever") is None


@given(
    st.text(alphabet="ae\u0301\u0323\u030a .한ᄒ\u1161\u11ab가\u3099か漢क\u093cא\u05b8🙂", max_size=60),
    st.integers(1, 7),
)
def test_long_text_is_composed_in_parts(text: str, window: int) -> None:
    assert composed(text, window=window) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("name", ["qwen3", "deepseekv4", "glm47"])
def test_long_text(name: str) -> None:
    text = "naïve e\u0301 words, 12345 数 and\n\n  more <|im_end|> 🙂🙂\t" * 4000 + "é" * 70_000 + "漢字" * 30_000
    original, fast = pair(name)
    ids = original.encode(text, add_special_tokens=False).ids
    assert fast.encode_array(text).tolist() == ids
    assert fast.decode(ids) == original.decode(ids, skip_special_tokens=False)


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(UnicodeEncodeError):
        pair("qwen3")[1].encode("a\ud83d")


def test_long_text_leaves_other_threads_running() -> None:
    fast, done = pair("qwen3")[1], threading.Event()
    ticks = 0
    worker = threading.Thread(target=lambda: (fast.encode("word by word\n" * 100_000), done.set()))
    worker.start()
    while not done.wait(0.001):
        ticks += 1
    worker.join()
    assert ticks > 5


def stand_in(data: Data) -> FastEncoder:
    text = json.dumps(data)
    return FastEncoder.of(text.encode(), lambda: tokenizers.Tokenizer.from_str(text))


def changed(change: Callable[[Data], None]) -> Data:
    data: Data = json.loads(tokenizer_json())
    change(data)
    return data


def merges_reversed(data: Data) -> None:
    data["model"]["merges"].reverse()


def takes_space(data: Data) -> None:
    data["added_tokens"][0]["lstrip"] = True


def lower_case(data: Data) -> None:
    data["normalizer"] = {"type": "Lowercase"}


def prefix_space(data: Data) -> None:
    data["pre_tokenizer"]["pretokenizers"][-1]["add_prefix_space"] = True


def digits(data: Data) -> None:
    data["pre_tokenizer"]["pretokenizers"].insert(0, {"type": "Digits", "individual_digits": True})


def other_ids(data: Data) -> None:
    data["added_tokens"][-1]["id"] += 1000


def one_id_twice(data: Data) -> None:
    vocab = data["model"]["vocab"]
    vocab["!"] = vocab["a"]


def new_option(data: Data) -> None:
    data["model"]["later"] = 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (merges_reversed, "it differs on "),
        (takes_space, "an added token takes white space"),
        (lower_case, "the normalizer is Lowercase"),
        (prefix_space, "the vocabulary is not byte-level"),
        (digits, "text is not cut by patterns"),
        (other_ids, "its added tokens have other ids or properties than the file says"),
        (one_id_twice, "two tokens have one id"),
        (new_option, "its model has later"),
    ],
)
def test_what_is_not_equal_is_not_used(change: Callable[[Data], None], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^{reason}"):
        stand_in(changed(change))


def test_merges_may_be_written_as_one_text() -> None:
    data: Data = json.loads(tokenizer_json())
    text = "naïve 数 <|im_end|>\n\n" + "".join(a + b for a, b in data["model"]["merges"][::50])
    lists = stand_in(data)
    data["model"]["merges"] = [" ".join(merge) for merge in data["model"]["merges"]]
    assert stand_in(data).encode(text) == lists.encode(text)


def test_a_token_that_no_merge_makes_is_not_made() -> None:
    data: Data = json.loads(tokenizer_json())
    word = "zqzqx"
    vocab = data["model"]["vocab"]
    vocab.update({token["content"]: token["id"] for token in data["added_tokens"]}, **{word: 200_000})
    fast = stand_in(data)
    assert 200_000 not in fast.encode(f"{word} {word}")
    assert fast.decode([200_000]) == word
    assert fast.token_to_id(word) == 200_000


def test_a_file_that_the_library_refuses_is_refused(tmp_path: Path) -> None:
    data: Data = json.loads(tokenizer_json())
    data["model"]["merges"].append(["no such token", "nor this"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), "utf-8")
    with pytest.raises(ConfigError, match="cannot read the tokenizer"):
        load_tokenizer(tmp_path, fast=True)


def test_words_without_a_vocabulary_of_bytes_are_not_supported() -> None:
    model = tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")
    with pytest.raises(UnsupportedError):
        stand_in(json.loads(tokenizers.Tokenizer(model).to_str()))


def test_a_checkpoint_is_read_with_it_on_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "miles.tito")
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(), "utf-8")
    plain, fast = load_tokenizer(tmp_path), load_tokenizer(tmp_path, fast=True)
    text = "<|im_start|>user\nnaïve 数 🙂<|im_end|>"
    assert fast.encode(text) == plain.encode(text)
    assert fast.decode(fast.encode(text)) == text
    assert (fast.added_tokens, fast.special_ids) == (plain.added_tokens, plain.special_ids)
    assert fast.vocab_size == plain.vocab_size
    assert not caplog.records
    data = json.loads(tokenizer_json())
    merges_reversed(data)
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), "utf-8")
    odd = load_tokenizer(tmp_path, fast=True)
    assert odd.encode(text) == load_tokenizer(tmp_path).encode(text)
    assert "without a faster encoder: it differs on" in caplog.text
