"""Reading a long body in pieces: the same value as in one go, and the same errors."""

from __future__ import annotations

import json
import random
from typing import Any

import orjson
import pytest

from helpers.outcomes import outcome
from miles_core.session.long_body import loads_long


def message(rng: random.Random) -> dict[str, Any]:
    """A message whose text looks like JSON, or that has objects inside."""
    texts = [
        '},{"role":"user"}',
        '"messages":[{',
        '\\"',
        "}, {",
        '],"tools":[{"a":1},{',
        "é😀",
        "words " * rng.randint(0, 9),
    ]
    kind = rng.randrange(3)
    if kind == 0:
        return {"role": "user", "content": [{"type": "text", "text": t} for t in rng.choices(texts, k=3)]}
    if kind == 1:
        return {"role": "assistant", "content": None, "tool_calls": [{"id": n, "messages": [{}, {}]} for n in range(3)]}
    return {"role": "tool", "content": rng.choice(texts)}


def body(rng: random.Random) -> dict[str, Any]:
    """A chat request with keys in any order."""
    parts: list[tuple[str, Any]] = [
        ("messages", [message(rng) for _ in range(rng.randrange(30))]),
        ("tools", [{"function": {"a": [{"b": n}, {"c": "},{"}]}} for n in range(rng.randrange(20))]),
        ("model", rng.choice(["m", '"messages":[{', "},{"])),
        ("extra", {"tools": [{"a": 1}, {"a": 2}], "messages": [{"x": 1}, {"y": 2}]}),
    ]
    rng.shuffle(parts)
    return dict(parts)


@pytest.mark.parametrize("seed", range(60))
def test_pieces_give_what_the_whole_gives(seed: int) -> None:
    rng = random.Random(seed)
    value = body(rng)
    for raw in (orjson.dumps(value), json.dumps(value).encode(), json.dumps(value, indent=1).encode()):
        for piece in (8, 40, 300, 10**6):
            read = loads_long(raw, piece=piece)
            assert read == value
            assert orjson.dumps(read) == orjson.dumps(orjson.loads(raw))  # the order of keys too


@pytest.mark.parametrize("seed", range(20))
def test_what_is_refused_as_a_whole_is_refused_in_pieces(seed: int) -> None:
    rng = random.Random(seed)
    raw = orjson.dumps(body(rng))
    for _ in range(60):
        at = rng.randrange(len(raw))
        broken = (
            raw[:at]
            + rng.choice([b"", b"]", b"}", b",", b'"', b"{", b"[", b"\\", b"\xff"])
            + raw[at + rng.randrange(2) :]
        )
        assert outcome(loads_long, broken, piece=30) == outcome(orjson.loads, broken)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"messages":[{"a":1},{"b":2},{"c":3}],"messages":[{"d":4},{"e":5},{"f":6}]}',
        b'{"messages":[{"a":1},{"b":2},{"c":3}],"tools":[{"d":4},{"e":5}],"messages":7}',
        b'{"messages":3,"tools":[{"a":1},{"b":2},{"c":3}],"messages":[{"d":4},{"e":5}]}',
        b'[{"messages":[{"a":1},{"b":2},{"c":3}]}]',
        b'"messages"',
    ],
)
def test_odd_bodies_are_read_alike(raw: bytes) -> None:
    assert orjson.dumps(loads_long(raw, piece=8)) == orjson.dumps(orjson.loads(raw))


@pytest.mark.parametrize("count", [1, 2000])
def test_long_lists_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    sizes: list[int] = []

    class Reader:
        JSONDecodeError = orjson.JSONDecodeError

        @staticmethod
        def loads(raw: bytes) -> Any:
            value = orjson.loads(raw)
            sizes.append(len(raw))
            return value

    monkeypatch.setattr("miles_core.session.long_body.orjson", Reader)
    many = [{"role": "user", "content": f"{n} " * 20} for n in range(count)]
    value = {"model": "m", "messages": many, "tools": [{"n": n, "of": [{}, {}]} for n in range(2000)]}
    assert loads_long(orjson.dumps(value), piece=2000) == value
    assert max(sizes) < 5000
    assert sum(sizes) < 2 * len(orjson.dumps(value))
