"""Probe conversations against what the official templates write, as far as the golden vectors have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from helpers.checkpoints import CHATML, own_template
from helpers.golden import Row, golden_names, golden_rows, installed_family
from miles_core.errors import RenderError
from miles_core.tito import ChatTemplate, normalise_tools
from miles_core.tito.probes import PROBES, Probe, compare_with_template, first_difference
from miles_core.types import Message, Tool

QWEN3 = installed_family("qwen3")


class Official:
    """The official template, as far as it was written down: looked up by the messages."""

    source = "the official template"

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        kwargs: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
    ) -> str:
        for row in self._rows:
            asked = [(m["role"], m["content"]) for m in row["messages"]]
            if asked == [(m["role"], m["content"]) for m in messages] and normalise_tools(row["tools"]) == tools:
                official: str = row["rendered"] if row["official_agrees"] else row["rendered_official"]
                return official
        raise RenderError("there is no such row")


def first_turns(name: str) -> list[Row]:
    """The golden first turns whose official text is known: with plain text, and without Kimi's tools."""
    return [
        row
        for row in golden_rows(name)
        if row["add_generation_prompt"]
        and "rendered" in row
        and not row["chat_template_kwargs"]
        and {m["role"] for m in row["messages"]} <= {"system", "user"}
        and all(isinstance(m["content"], str) for m in row["messages"])
        and not ("rendered_hf_tokenizer" in row and row["tools"])
        and (row["official_agrees"] or "rendered_official" in row)
    ]


@pytest.mark.parametrize("name", [name for name in golden_names() if "official_agrees" in golden_rows(name)[0]])
def test_the_official_templates_agree_on_first_turns(name: str) -> None:
    family, _, revision = name.partition("@")
    facts = installed_family(family)
    rows = first_turns(name)
    probes = [
        Probe(name=row["case"], messages=tuple(row["messages"]), tools=tuple(row["tools"] or ()), kwargs={})
        for row in rows
    ]
    results = compare_with_template(facts, facts.revision(revision or None), Official(rows), probes)
    differ = {result.name for result in results if not result.agrees}
    assert len(results) > 5
    assert differ <= {"sys_empty", "tools_sys_empty"}  # Inkling's writes a block for empty text; no probe has any


def test_each_side_of_a_difference_is_kept() -> None:
    results = {r.name: r for r in compare_with_template(QWEN3, QWEN3.revisions[0], ChatTemplate(CHATML, source="c"))}
    assert list(results) == [probe.name for probe in PROBES]
    assert results["question"].agrees
    off = results["thinking-off"]
    assert (off.agrees, off.first_turn, off.error) == (False, True, None)
    assert off.expected == f"{off.actual}<think>\n\n</think>\n\n"
    assert not results["call"].first_turn


def test_a_side_that_refuses_says_why() -> None:
    refusing = ChatTemplate("{{ raise_exception('not today') }}", source="c")
    for result in compare_with_template(QWEN3, QWEN3.revisions[0], refusing):
        assert (result.agrees, result.actual) == (False, None)
        assert result.error == "the chat template c refused the messages: not today"
        assert result.expected


def test_fixed_kwargs_go_to_both_and_derived_ones_to_the_template_alone() -> None:
    seen: list[Mapping[str, Any]] = []

    class Noting(Official):
        def render(self, messages: Any, tools: Any, kwargs: Mapping[str, Any], *, add_generation_prompt: bool) -> str:
            seen.append(kwargs)
            return ""

    kimi = installed_family("kimi25")
    compare_with_template(kimi, kimi.revisions[0], Noting([]))
    assert all(kwargs["preserve_thinking"] is True for kwargs in seen)
    declared = [kwargs["tools_ts_str"] for kwargs in seen if "tools_ts_str" in kwargs]
    assert len(declared) == sum(bool(probe.tools) for probe in PROBES)
    assert "type weigh = (_: {" in declared[0]


def test_a_family_without_a_rendering_of_its_own_has_nothing_to_compare() -> None:
    default = installed_family("default")
    assert compare_with_template(default, default.revisions[0], ChatTemplate(CHATML, source="c")) == []


@pytest.mark.parametrize(
    ("expected", "actual", "index", "texts"),
    [
        ("abcdef", "abXdef", 2, ("bcde", "bXde")),
        ("abc", "abcdef", 3, ("c", "cdef")),
        ("", "x", 0, ("", "x")),
    ],
)
def test_the_first_difference_has_context(expected: str, actual: str, index: int, texts: tuple[str, str]) -> None:
    found = first_difference(expected, actual, before=1, after=3)
    assert found is not None
    assert (found.index, (found.expected, found.actual)) == (index, texts)
    assert first_difference(actual, actual) is None


def test_every_template_of_ours_compares_with_itself() -> None:
    own = ChatTemplate(own_template("qwen3.jinja"), source="own")
    assert all(result.agrees for result in compare_with_template(QWEN3, QWEN3.revisions[0], own))
