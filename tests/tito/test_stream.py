"""Ids to text as they come: any split gives the same text, at a cost in proportion to the ids."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest
import tokenizers

from miles_core.testing import byte_tokenizer
from miles_core.tito import TextStream, Tokenizer

BYTES = byte_tokenizer(["<hidden>"], ["<tag>", "<｜tag｜>"])


def sentence_pieces() -> Tokenizer:
    """Pieces that mark spaces, with one token a byte for what has no piece, as Llama's."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "▁", "b", "▁東"]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({p: n for n, p in enumerate(pieces)}, [], byte_fallback=True))
    decoders = tokenizers.decoders
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend, source="pieces")


def text(tokenizer: Tokenizer, ids: Sequence[int], sizes: Sequence[int]) -> str:
    stream, at, out = TextStream(tokenizer, frozenset()), 0, ""
    while at < len(ids):
        size = sizes[at % len(sizes)]
        out += stream.feed(ids[at : at + size])
        at += size
    return out + stream.finish()


@pytest.mark.parametrize("tokenizer", [BYTES, sentence_pieces()], ids=["bytes", "pieces"])
def test_every_split_gives_the_same_text(tokenizer: Tokenizer) -> None:
    chance = random.Random(4)
    letters = [tokenizer.encode(letter) for letter in ("東", "🌊", "é", "a b", "\ufffd")]
    for _ in range(400):
        ids: list[int] = []
        while len(ids) < chance.randint(0, 40):
            known = chance.randrange(tokenizer.vocab_size)
            ids += chance.choice([chance.choice(letters), [known], [known] * 9, chance.choice(letters)[:2]])
        whole = text(tokenizer, ids, [1000])
        assert whole == tokenizer.decode(ids)
        assert {text(tokenizer, ids, sizes) for sizes in ([1], [3], [1, 2, 20], [17])} == {whole}


def test_characters_come_out_as_soon_as_they_are_whole() -> None:
    stream = TextStream(BYTES, frozenset())
    assert [stream.feed([i]) for i in BYTES.encode("aé🌊")] == ["a", "", "é", "", "", "", "🌊"]
    broken = BYTES.encode("é")[:1]
    assert [stream.feed(broken), stream.feed(broken), stream.finish()] == ["", "\ufffd", "\ufffd"]


def test_ids_that_are_no_tokens_have_no_text() -> None:
    hidden = BYTES.token_to_id("<hidden>")
    assert hidden is not None
    stream = TextStream(BYTES, frozenset([hidden]))
    ids = [-1, *BYTES.encode("é")[:1], 10**6, 2**32, 2**70, hidden, *BYTES.encode("é")[1:], *BYTES.encode("<｜tag｜>")]
    assert "".join(stream.feed([i]) for i in ids) + stream.finish() == "é<｜tag｜>"


@pytest.mark.parametrize("bytes_", [b"\x80", b"\xe6", b"\xe6\x9d", b"\xf0\x9f\x8c", b"\xff\xe6"])
def test_a_long_run_of_broken_characters_costs_no_more_than_any(bytes_: bytes) -> None:
    token = {chr(n): i for n in range(256) if (i := BYTES.token_to_id(_letter(n))) is not None}
    ids = [token[chr(byte)] for byte in bytes_ * (20_000 // len(bytes_))]
    start = time.process_time()
    stream = TextStream(BYTES, frozenset())
    out = "".join(stream.feed([i]) for i in ids) + stream.finish()
    assert time.process_time() - start < 4  # 0.5 s; a hundred times that if all were decoded again and again
    assert out == (bytes_ * (20_000 // len(bytes_))).decode("utf-8", "replace")


def _letter(byte: int) -> str:
    """The letter that byte-level vocabularies write for a byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [n for n in range(256) if n not in printable]
    return chr(byte) if byte in printable else chr(256 + others.index(byte))
