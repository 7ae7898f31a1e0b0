"""Texts are found in windows as they are found at once."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.tito.literals import WINDOW, Literals

TEXTS = ("ab", "abc", "b", "cab", "[x]")


@given(st.text(alphabet="abcx[]", max_size=60), st.integers(1, 9))
def test_windows_find_what_one_search_finds(text: str, window: int) -> None:
    pattern = re.compile("|".join(re.escape(each) for each in sorted(TEXTS, key=len, reverse=True)))
    want = [match.span() for match in pattern.finditer(text)]
    found = Literals(TEXTS, window=window)
    assert [match.span() for match in found.find(text)] == want
    assert found.count(text) == len(want)


@pytest.mark.parametrize("at", range(WINDOW - 12, WINDOW + 3))
def test_a_text_across_the_end_of_a_window(at: int) -> None:
    text = "x" * at + "<|im_start|>" + "x" * WINDOW
    (match,) = Literals(["<|im_start|>", "<|im_"]).find(text)
    assert match.span() == (at, at + 12)


def test_nothing_to_find() -> None:
    assert Literals(()).count("abc") == 0
