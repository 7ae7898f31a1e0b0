"""Answers are kept byte for byte, whatever they share with the ones beside them."""

from __future__ import annotations

import base64
import json
import random
import sys
from typing import Any

import pytest

from miles_core.session.answer import WORTH_SHARING, Answer, RowText, kept_answer


def reply(**meta: Any) -> tuple[bytes, dict[str, Any]]:
    return json.dumps({"choices": [{"message": {"content": "x"}, "meta_info": meta}]}).encode(), meta


def text(size: int, seed: int = 1) -> str:
    return base64.b64encode(random.Random(seed).randbytes(size)).decode()


def own(answer: Answer, key: str = "routed_experts") -> int:
    """How many characters of rows an answer holds itself."""
    rows = answer.rows[key]
    assert isinstance(rows, RowText)
    return len(rows.own)


def test_a_growing_text_is_held_once() -> None:
    held: list[Answer] = []
    rows = random.Random(1).randbytes(40_000)
    for size in range(400, 40_001, 400):
        raw, meta = reply(routed_experts=base64.b64encode(rows[:size]).decode(), indexer_topk=text(16))
        held.append(kept_answer(raw, meta, held[-1:]))
        assert held[-1].raw == raw
        found = held[-1].rows["routed_experts"]
        assert found is not None
        assert found.size == size
        assert base64.b64decode(b"".join(found.pieces()), validate=True) == rows[:size]
    assert sum(map(own, held)) < 40_000 * 4 / 3 + 2 * WORTH_SHARING


@pytest.mark.parametrize("at", [0, 5, 4000, 70_000, 99_999])
def test_a_text_that_differs_somewhere_goes_on_alone_from_there(at: int) -> None:
    first = text(75_000)
    assert len(first) == 100_000
    second = first[:at] + ("A" if first[at] != "A" else "B") + first[at + 1 :] + "AAAA"
    (raw, meta), (other, other_meta) = reply(routed_experts=first), reply(routed_experts=second)
    earlier = kept_answer(raw, meta, [])
    later = kept_answer(other, other_meta, [earlier])
    assert (earlier.raw, later.raw) == (raw, other)
    assert own(later) == len(second) - (at if at >= 1024 else 0)


def test_the_one_beside_it_that_says_most_is_shared() -> None:
    whole = text(9000)
    raw, meta = reply(routed_experts=whole)
    beside = [kept_answer(*reply(routed_experts=each), []) for each in (text(9000, 2), whole[:4000], whole[:8000])]
    assert own(kept_answer(raw, meta, beside)) == len(whole) - 8000


def test_attempts_at_one_place_keep_no_more_than_the_first_alive() -> None:
    stem = text(6000)
    held: list[Answer] = []
    for seed in range(50):
        held.append(kept_answer(*reply(routed_experts=stem + text(3000, seed)), held[-1:]))
    rows = held[-1].rows["routed_experts"]
    depth = 0
    while rows is not None:
        rows, depth = rows.earlier, depth + 1
    assert depth <= 4
    assert held[-1].raw == reply(routed_experts=stem + text(3000, 49))[0]


@pytest.mark.parametrize("value", [None, "", "AAAA", "no base64 ü", 5, [], {"a": "b"}])
@pytest.mark.parametrize("other", [None, "", "AAAA", 7])
def test_odd_values_are_kept_as_they_came(value: Any, other: Any) -> None:
    raw, meta = reply(indexer_topk=other, routed_experts=value, indexer_topk_num_layers=2)
    answer = kept_answer(raw, meta, [])
    assert answer.raw == raw
    assert ("routed_experts" in answer.rows, "indexer_topk" in answer.rows) == (value is not None, other is not None)
    assert (answer.rows.get("routed_experts") is not None) is isinstance(value, str)
    assert answer.indexer_layers == 2


def test_a_text_spelled_with_escapes_or_twice() -> None:
    value = "ab/+" * 1000
    for raw in (
        reply(routed_experts=value)[0].replace(b"/", b"\\/"),
        reply(routed_experts=value, copy=value)[0],
        reply(copy=value, routed_experts=value)[0],
    ):
        answer = kept_answer(raw, {"routed_experts": value}, [])
        assert answer.raw == raw
        assert own(answer) == len(value)
        assert kept_answer(raw, {"routed_experts": value}, [answer]).raw == raw


def test_a_chain_longer_than_the_stack() -> None:
    rows = text(3000)
    answer: list[Answer] = []
    for _ in range(sys.getrecursionlimit() + 100):
        rows += "AAAA"
        answer = [kept_answer(*reply(routed_experts=rows), answer)]
    assert answer[0].raw == reply(routed_experts=rows)[0]
    assert repr(answer[0])
