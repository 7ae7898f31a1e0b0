"""Ids of a rendering are what encoding it gives, whatever of the session's own they reuse."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.chat_tokenizer import chat_family, write_checkpoint
from miles_core.tito import BoundFamily, load_tokenizer
from miles_core.tito.literals import are_apart
from miles_core.tito.rendered import RenderedIds


def respelled(data: Any) -> None:
    """Tokens that begin within control tokens, or end there, and are none."""
    names = {"<|object_ref_start|>": "|im_end|>\n", "<|object_ref_end|>": "d<|im_"}
    for token in data["added_tokens"]:
        if token["content"] in names:
            token.update(content=names[token["content"]], special=False)
    vocab = data["model"]["vocab"]
    vocab.update({names[old]: vocab.pop(old) for old in names if old in vocab})


def normalised(data: Any) -> None:
    """Control tokens that are looked for when characters are composed."""
    for token in data["added_tokens"]:
        token["normalized"] = token["content"] in ("<|im_end|>", "<think>")


@pytest.fixture(scope="module", params=[None, respelled, normalised], ids=["plain", "overlapping", "normalised"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BoundFamily:
    folder = write_checkpoint(tmp_path_factory.mktemp("qwen3"))
    if request.param is not None:
        data = json.loads((folder / "tokenizer.json").read_text("utf-8"))
        request.param(data)
        (folder / "tokenizer.json").write_text(json.dumps(data), "utf-8")
    tokenizer = load_tokenizer(folder, fast=True)
    assert tokenizer.cut("", frozenset()) is not None, "the faster encoder is used"
    return chat_family().family.bind(tokenizer)


PIECE = st.one_of(
    st.sampled_from(
        [
            "<|im_start|>",
            "<|im_end|>",
            "<|im_end|>\u0338",
            "|im_end|>",
            "<think>",
            "user\n",
            "Hello HAVING it",
            " é e\u0301",
            "\n",
            "<|im_",
        ]
    ),
    st.text(alphabet="aé \n<|\u0301数", max_size=5),
)
TURN = st.tuples(st.lists(PIECE, max_size=6).map("".join), st.lists(st.integers(0, 151_668), max_size=6))
"""What a prompt brings, as text, and what is sampled behind it."""


def laid_out(
    family: BoundFamily, turns: Sequence[tuple[str, Sequence[int]]]
) -> tuple[array[int], list[tuple[int, int]]]:
    """A session's ids, and the spans of those that came from text."""
    ids, spans = array("i"), []
    for text, sampled in turns:
        start = len(ids)
        ids.extend(family.tokenizer.encode_array(text))
        spans.append((start, len(ids)))
        ids.extend(sampled)
    return ids, spans


@given(turns=st.lists(TURN, max_size=5), other=st.lists(PIECE, max_size=6).map("".join), at=st.integers(0, 30))
def test_always_what_encoding_gives(
    family: BoundFamily, turns: list[tuple[str, list[int]]], other: str, at: int
) -> None:
    rendered = RenderedIds(family)
    ids, spans = laid_out(family, turns)
    own = family.tokenizer.decode(ids)
    for text in (own, own[:at] + other + own[at:], other):
        for _ in range(2):
            assert rendered.of(text, ids, spans) == family.tokenizer.encode_array(text)


def test_a_control_token_that_another_hides_is_none(family: BoundFamily) -> None:
    """As many are spelled as there are ids, and they are others."""
    encode, end = family.tokenizer.encode_array, family.tokenizer.added_tokens["<|im_end|>"]
    ids = encode("d") + array("i", [end]) + encode("x")
    for piece in ("<", "|", "im", "_end", "|>", "y"):
        ids += encode(piece)
    text = family.tokenizer.decode(ids)
    assert text == "d<|im_end|>x<|im_end|>y"
    assert RenderedIds(family).of(text, ids, []) == encode(text)


def test_what_was_tokenized_before_is_not_tokenized_again(family: BoundFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    said = [
        ("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n", "<think>\nWell.\n</think>\n\nHAVING<|im_end|>")
    ]
    said += [
        ("\n" + said[0][0].replace("Hello", f"Go on {n}"), said[0][1].replace("Well", f"Well {n}")) for n in range(3)
    ]
    encode = family.tokenizer.encode_array
    ids, spans = laid_out(family, [(text, list(encode(sampled))) for text, sampled in said])
    text = "".join(part for turn in said for part in turn)
    rendered, asked = RenderedIds(family), list[str]()
    monkeypatch.setattr(family.tokenizer, "encode_array", lambda text: asked.append(text) or encode(text))
    assert rendered.of(text, ids, spans) == encode(text) == ids
    assert [part for part in asked if "HAVING" not in part and part != "\n"] == []
    asked.clear()
    assert rendered.of(text, ids, spans) == ids
    assert asked == []


def test_a_tokenizer_that_cannot_be_cut_encodes_all() -> None:
    family = chat_family()
    text = "<|im_start|>user\nHello<|im_end|>\n"
    ids = family.tokenizer.encode_array(text)
    assert RenderedIds(family).of(text, ids, [(0, len(ids))]) == ids


@pytest.mark.parametrize(
    ("texts", "apart"),
    [
        (["<|a|>", "<|b|>", "<think>", "</think>"], True),
        (["<|a|>"], True),
        ([], True),
        (["<|a|>", "<|a|>b"], False),
        (["<|a<b>|>", "<b>"], False),
        (["x<|a", "<|ab"], False),
        (["aba"], False),
        (["<a>", "<a><b>"], False),
        (["]<]start[>[", "]<]end[>["], True),
        (["[a[", "[b["], False),
    ],
)
def test_tokens_that_can_begin_within_another_are_told(texts: list[str], apart: bool) -> None:
    assert are_apart(set(texts)) is apart
