"""Long texts in JSON, read and written in pieces: the same value and the same bytes as in one go."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from helpers.outcomes import outcome
from miles_core.session import long_text
from miles_core.session.long_body import loads_long
from miles_core.session.long_text import cut_texts, dumps_list

BITS = [
    "word ",
    '"',
    "\\",
    "\n",
    "\t",
    "é",
    "→",
    "😀",
    "\u0000",
    "\\u12",
    '\\"',
    '","',
    '":"',
    "}]",
    "\\ud83d",
    "/",
    "ÿ",
]


def text(rng: random.Random, count: int) -> str:
    """Some text, now and then of one kind of character alone."""
    return "".join(rng.choices(rng.sample(BITS, rng.choice([1, 2, len(BITS)])), k=count))


def spellings(value: Any) -> list[bytes]:
    """The ways in which clients write JSON."""
    return [orjson.dumps(value), json.dumps(value).encode(), json.dumps(value, indent=1, ensure_ascii=False).encode()]


@pytest.mark.parametrize("seed", range(40))
def test_a_long_text_is_read_alike_wherever_it_is_cut(seed: int) -> None:
    rng = random.Random(seed)
    value = {
        "messages": [{"role": "user", "content": text(rng, rng.randrange(80))} for _ in range(rng.randrange(1, 4))],
        "tools": [{"function": {"enum": [text(rng, 40)] * 2, text(rng, 20): 1}}],
        "input_ids": list(range(rng.randrange(60))),
    }
    for raw in spellings(value):
        for piece in (2, 7, 16, 33, 100):
            assert orjson.dumps(loads_long(raw, piece=piece)) == orjson.dumps(orjson.loads(raw))


@pytest.mark.parametrize("spell", [orjson.dumps, lambda value: json.dumps(value).encode()], ids=["orjson", "json"])
@pytest.mark.parametrize("bit", BITS)
def test_each_kind_of_character_is_cut_between_and_not_within(bit: str, spell: Callable[[Any], bytes]) -> None:
    for lead in range(7):
        value = {"content": "x" * lead + bit * 40}
        raw = spell(value)
        short, texts = cut_texts(raw, 16)
        assert list(texts.values()) == [value["content"]]
        assert len(short) == len('{"content":""}') + 32 + raw.count(b": ")
        assert loads_long(raw, piece=16) == value


@pytest.mark.parametrize("seed", range(20))
def test_what_is_no_json_is_refused_in_the_same_words(seed: int) -> None:
    rng = random.Random(seed)
    raw = rng.choice(spellings({"messages": [{"role": "user", "content": text(rng, 60)}], "n": 1}))
    for _ in range(60):
        at = rng.randrange(len(raw))
        spoilt = raw[:at] + rng.choice([b"", b'"', b"\\", b"\xff", b"\n", b"\\ud83d"]) + raw[at + rng.randrange(2) :]
        assert outcome(lambda raw: loads_long(raw, piece=12), spoilt) == outcome(orjson.loads, spoilt)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"content":"%s","content":"short"}' % (b"long " * 20),
        b'{"content":"short","content":"%s"}' % (b"long " * 20),
        b'{"%s":1,"b":2}' % (b"a long key " * 20),
        b'"%s"' % (b"nothing but a text " * 20),
        b'["%s","%s"]' % (b"one " * 30, b"two " * 30),
        b'{"a":%s,"b":[%s]}' % (b"1" * 15, b", ".join([b"1234567"] * 30)),
        b'{"a"  :\n "%s" }   %s' % (b"x" * 200, b" " * 200),
    ],
)
def test_odd_places_for_long_texts(raw: bytes) -> None:
    assert orjson.dumps(loads_long(raw, piece=16)) == orjson.dumps(orjson.loads(raw))


class Watched:
    """orjson, which notes how long what it reads and writes is."""

    JSONDecodeError = orjson.JSONDecodeError

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def loads(self, raw: bytes) -> Any:
        self.sizes.append(len(raw))
        return orjson.loads(raw)

    def dumps(self, value: Any) -> bytes:
        raw = orjson.dumps(value)
        self.sizes.append(len(raw))
        return raw


MANY = "".join(f'  if "{n}" != \\ {n}:  # “{n}” → é\n' for n in range(9000))


@pytest.mark.parametrize("content", ["word " * 60_000, MANY], ids=["words", "code"])
def test_no_piece_is_long(monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    for module in ("long_text", "long_body"):
        monkeypatch.setattr(f"miles_core.session.{module}.orjson", watched := Watched())
    value = {"model": "m", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": content}]}
    raw = orjson.dumps(value)
    assert loads_long(raw, piece=2000) == value
    assert max(watched.sizes) < 2100
    monkeypatch.setattr(long_text, "orjson", watched := Watched())
    monkeypatch.setattr(long_text, "TEXT_AT_ONCE", 1000)
    assert b"[%s]" % dumps_list(value["messages"]) == orjson.dumps(value["messages"])
    assert max(watched.sizes) < 2100


@pytest.mark.parametrize("count", [0, 1, 2, 64, 65, 1000])
def test_a_list_is_written_alike(count: int) -> None:
    rng = random.Random(count)
    values = [
        rng.choice([{"content": text(rng, 9)}, {"content": None}, {"x": [1, 2.5]}, "text", None]) for _ in range(count)
    ]
    assert b"[%s]" % dumps_list(values) == orjson.dumps(values)
    long = [*values, {"role": "user", "content": text(rng, 40_000), "name": "é"}]
    assert b"[%s]" % dumps_list(long) == orjson.dumps(long)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a":"%s' % (b"long " * 2000),
        b'{"a":"%s' % (b'\\"' * 4000),
        b'{"a" x"%s"}' % (b'\\"' * 4000),
        b'{"a":"b:",%s}' % (b"1," * 4000),
    ],
    ids=["no end", "no end, with quotes", "no beginning", "no text"],
)
def test_what_is_no_json_is_looked_at_once(monkeypatch: pytest.MonkeyPatch, raw: bytes) -> None:
    """Whoever sends it costs no more than one who sends JSON: not the square of its length."""
    watched, looks, escaped = Watched(), 0, long_text._escaped

    def look(raw: bytes, at: int) -> bool:
        nonlocal looks
        looks += 1
        return escaped(raw, at)

    monkeypatch.setattr(long_text, "orjson", watched)
    monkeypatch.setattr(long_text, "_escaped", look)
    assert outcome(lambda raw: loads_long(raw, piece=50), raw) == outcome(orjson.loads, raw)
    assert sum(watched.sizes) < 2 * len(raw)
    assert looks <= raw.count(b'"')
