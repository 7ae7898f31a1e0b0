"""Checks of families on any ids, settings and lengths find what is wrong."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from typing import Any

import pytest

from miles_core.plugins import Plugin, PluginRecord
from miles_core.testing.conformance import family_limits
from miles_core.testing.conformance.report import CheckAnswer
from miles_core.tito import BoundFamily, JsonCalls, StreamParser, TitoFamily
from miles_core.tito.stream import TextStream
from miles_core.types import Message
from miles_tito_families import qwen3


def answer(check: str, facts: TitoFamily) -> CheckAnswer:
    record = PluginRecord("family", "p", "zz-a", "1.0", "zz_a")
    plugin = Plugin(record, {"tito_family": lambda: facts}, types.ModuleType("zz_a"), None)
    return family_limits.CHECKS[check](plugin)


def changed(**facts: Any) -> TitoFamily:
    return dataclasses.replace(qwen3.FAMILY, **facts)


@pytest.mark.parametrize("check", family_limits.CHECKS)
def test_a_good_family_passes(check: str) -> None:
    assert answer(check, qwen3.FAMILY) is None


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        (
            {"assistant_opener": "<|im_strt|>assistant"},
            "assistant_opener is '<|im_strt|>assistant', which",
        ),
        (
            {"turn_end": "<|im_stop|>\n"},
            "turn_end is '<|im_stop|>\\n', which its template does not write: '<|im_start|>",
        ),
        (
            {"parse_facts": dataclasses.replace(qwen3.FAMILY.parse_facts, calls=JsonCalls(opener="<call>"))},
            "parse_facts.calls is '<call>', which its template does not write",
        ),
    ],
)
def test_a_misspelt_fact_is_found(facts: dict[str, Any], told: str) -> None:
    found = answer("names what it writes", changed(**facts))
    assert isinstance(found, str)
    assert found.startswith(f"revision qwen3: {told}")


def test_a_turn_that_history_ends_otherwise_is_seen_by_the_self_check() -> None:
    found = answer("passes the self-check", changed(trailing_tokens=()))
    assert isinstance(found, str)
    assert found.startswith("revision qwen3, one answer: ")


class Fragile(StreamParser):
    """Reads text, and trips over a tag."""

    def _step(self, deltas: list[dict[str, Any]], final: bool) -> bool:
        if "</think>" in self._buffer:
            raise IndexError("no reasoning was opened")
        text, self._buffer = self._buffer, ""
        self._emit(deltas, "content", text)
        return False


class Forgetful(Fragile):
    """Reads text, and loses what comes at once."""

    def _step(self, deltas: list[dict[str, Any]], final: bool) -> bool:
        text, self._buffer = self._buffer[-1:], ""
        self._emit(deltas, "content", text)
        return False


class Slow(Fragile):
    """Looks at all it has read with every id."""

    def _step(self, deltas: list[dict[str, Any]], final: bool) -> bool:
        text, self._buffer = self._buffer, ""
        self._emit(deltas, "content", text)
        "".join(self._content)
        return False


def parsed_by(parser: type[StreamParser]) -> TitoFamily:
    class Bound(BoundFamily):
        def parser(self, *arguments: Any, **keywords: Any) -> StreamParser:
            return parser(TextStream(self.tokenizer, self.hidden_ids))

    return changed(bound_class=Bound)


def test_a_parser_that_raises_is_shown_what_it_raises_on() -> None:
    found = answer("reads any ids", parsed_by(Fragile))
    assert isinstance(found, str)
    assert found.startswith("revision qwen3, sampled '")
    assert found.endswith(": IndexError: no reasoning was opened")


def test_a_parser_whose_answer_depends_on_how_ids_are_split() -> None:
    found = answer("reads any ids", parsed_by(Forgetful))
    assert isinstance(found, str)
    assert ": read id by id it is {'role': 'assistant', 'content': '" in found


def test_a_family_that_reads_no_message() -> None:
    class Bound(BoundFamily):
        def parse(self, *arguments: Any, **keywords: Any) -> Message:
            return {"role": "assistant", "content": None}

    found = answer("reads any ids", changed(bound_class=Bound))
    assert isinstance(found, str)
    assert found.endswith("read as {'role': 'assistant', 'content': None}, which is no assistant's message with text")


def test_a_join_that_drops_ids_it_may_not() -> None:
    class Bound(BoundFamily):
        def join(self, checkpoint_ids: Sequence[int], suffix_ids: Sequence[int]) -> tuple[int, list[int]]:
            return len(checkpoint_ids) - 2, []

    found = answer("reads any ids", changed(bound_class=Bound))
    assert isinstance(found, str)
    assert found.endswith(": join keeps -2 of 0 ids, max_trim_tokens is 0")


def test_a_fixed_setting_that_can_be_changed() -> None:
    class Bound(BoundFamily):
        def merge_kwargs(self, *layers: Any) -> dict[str, Any]:
            return {key: value for layer in layers for key, value in (layer or {}).items()}

    found = answer("honours kwargs", changed(bound_class=Bound))
    assert found == "revision qwen3: fixes clear_thinking=False, and takes clear_thinking=True"


def test_aliases_that_are_two_settings() -> None:
    found = answer("honours kwargs", changed(kwarg_aliases=(("enable_thinking", "thinking"),)))
    told = "enable_thinking and thinking are declared as one setting, and write different text"
    assert found == f"revision qwen3: {told}"


def test_aliases_that_do_not_replace_each_other() -> None:
    class Bound(BoundFamily):
        def merge_kwargs(self, *layers: Any) -> dict[str, Any]:
            merged = {key: value for layer in layers for key, value in (layer or {}).items()}
            off = any(merged.pop(key, None) is False for key in ("enable_thinking", "thinking"))
            return {**merged, "enable_thinking": not off}

    facts = {"kwarg_aliases": (("enable_thinking", "thinking"),), "fixed_kwargs": {}}
    found = answer("honours kwargs", changed(bound_class=Bound, **facts))
    assert found == "revision qwen3: thinking does not replace enable_thinking, though they are declared as one setting"


def test_a_join_that_looks_at_the_whole_history() -> None:
    class Bound(BoundFamily):
        def join(self, checkpoint_ids: Sequence[int], suffix_ids: Sequence[int]) -> tuple[int, list[int]]:
            list(checkpoint_ids)
            return super().join(checkpoint_ids, suffix_ids)

    found = answer("takes long histories", changed(bound_class=Bound))
    assert isinstance(found, str)
    assert found.startswith("revision qwen3: join looks at ")
    assert found.endswith(" ids of a checkpoint; look at its end alone")


def test_a_parser_whose_time_grows_with_what_it_has_read() -> None:
    found = answer("takes long histories", parsed_by(Slow))
    assert isinstance(found, str)
    assert found.endswith("s: the time grows faster than the generation")
