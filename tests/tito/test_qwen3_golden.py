"""The qwen3 family against the golden vectors: text, ids, increments, joins and parsing."""

from __future__ import annotations

import gzip
import hashlib
import json
from typing import Any

import pytest

from helpers.chat_tokenizer import DATA, NEWLINE, chat_family
from miles_core.errors import RenderError

FAMILY = chat_family()
Row = dict[str, Any]


def read_rows() -> list[Row]:
    with gzip.open(DATA / "golden_qwen3.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


ROWS = read_rows()
AMBIGUOUS = {"ua_reasoning_close_tag"}
"""Reasoning that spells the closing tag: the ids do not say where it ended."""


def named(row: Row) -> str:
    kwargs = "".join(f"-{k}={v}" for k, v in row["chat_template_kwargs"].items())
    return f"{row['case']}{kwargs}-{'prompt' if row['add_generation_prompt'] else 'whole'}"


def render(row: Row, messages: list[Row] | None = None, prompt: bool | None = None) -> str:
    """The family's text of a row, or of other messages under the row's settings."""
    kwargs = FAMILY.merge_kwargs(row["chat_template_kwargs"])
    return FAMILY.render(
        row["messages"] if messages is None else messages,
        row["tools"],
        kwargs,
        row["add_generation_prompt"] if prompt is None else prompt,
    )


every_row = pytest.mark.parametrize("row", ROWS, ids=named)
every_junction = pytest.mark.parametrize(
    ("row", "at"),
    [
        pytest.param(row, at, id=f"{named(row)}-{junction['k']}-{at}")
        for row in ROWS
        for at, junction in enumerate(row.get("junctions", []))
    ],
)


def test_the_rows_are_there() -> None:
    assert len(ROWS) == 172
    assert sum(len(row.get("junctions", [])) for row in ROWS) == 96


@every_row
def test_text(row: Row) -> None:
    if "error" in row:
        with pytest.raises(RenderError):
            render(row)
    else:
        assert render(row) == row["rendered"]
        assert FAMILY.effective_kwargs(row["chat_template_kwargs"]) == row["effective_kwargs"]


@pytest.mark.parametrize("row", [row for row in ROWS if "n_ids" in row], ids=named)
def test_ids(row: Row) -> None:
    ids = FAMILY.encode(render(row))
    assert len(ids) == row["n_ids"]
    assert hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16] == row["ids_sha256"]
    if "ids" in row:
        assert ids == row["ids"]


@every_junction
def test_increment(row: Row, at: int) -> None:
    junction = row["junctions"][at]
    k = junction["k"]
    appended = row["messages"][k : k + junction["appended"]]
    assert [message["role"] for message in appended] == junction["appended_roles"]
    assert set(junction["appended_roles"]) <= set(FAMILY.family.allowed_append_roles)
    kwargs = FAMILY.merge_kwargs(row["chat_template_kwargs"])
    text = FAMILY.render_suffix(row["messages"][k - 1], appended, row["tools"], kwargs)
    assert text == junction["incremental_text"]
    assert FAMILY.encode(text) == junction["incremental_ids"]


@every_junction
def test_join(row: Row, at: int) -> None:
    junction = row["junctions"][at]
    prefix = row["rendered"][: junction["prefix_chars"]]
    assert hashlib.sha256(prefix.encode()).hexdigest()[:16] == junction["prefix_sha256"]
    ids = FAMILY.encode(prefix)
    assert ids[-1] == NEWLINE
    checkpoint = ids[:-1]
    for merge in junction["merge"]:
        assert len(checkpoint) == merge["prefix_len"]
        assert checkpoint[-len(merge["prefix_tail_ids"]) :] == merge["prefix_tail_ids"]
        kept, bridge = FAMILY.join(checkpoint, junction["incremental_ids"])
        merged = [*checkpoint[:kept], *bridge, *junction["incremental_ids"]]
        assert len(merged) == merge["merged_len"]
        whole = render(row, row["messages"][: junction["k"] + junction["appended"]], True)
        assert (FAMILY.encode(whole) == merged) is merge["ids_equal_full_encode"]
        assert FAMILY.tokenizer.decode(merged) == whole


@pytest.mark.parametrize(
    ("row", "at"),
    [
        pytest.param(row, at, id=f"{named(row)}-{completion['index']}")
        for row in ROWS
        for at, completion in enumerate(row.get("completions", []))
        if completion["text"] is not None and row["case"] not in AMBIGUOUS
    ],
)
def test_a_completion_parses_to_what_renders_the_same(row: Row, at: int) -> None:
    completion = row["completions"][at]
    index = completion["index"]
    ids = FAMILY.encode(completion["text"].removesuffix("\n"))
    parsed = FAMILY.parse(ids, row["tools"])
    before, original = row["messages"][:index], row["messages"][index]
    assert render(row, [*before, parsed], False) == render(row, [*before, original], False)
    names = [call["function"]["name"] for call in original.get("tool_calls") or []]
    assert [call["function"]["name"] for call in parsed.get("tool_calls", [])] == names
