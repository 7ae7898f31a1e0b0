"""Stop strings: found at once, cut off exactly, never shown in part."""

from __future__ import annotations

import pytest

from helpers.tiny import build_tokenizer
from miles_engines.local_server.stops import StopGate, StopStrings

TOKENIZER = build_tokenizer()


def decode(ids: object) -> str:
    text: str = TOKENIZER.decode(list(ids), skip_special_tokens=False)  # type: ignore[call-overload]  # any iterable
    return text


def encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def stops(*strings: str) -> StopStrings:
    return StopStrings(strings, decode, encode)


@pytest.mark.parametrize(
    ("text", "string", "shown"),
    [
        ("abc STOP def", "STOP", "abc "),
        ("the weather in Paris", "eather", "the w"),
        ("日本語です", "語", "日本"),
        ("STOP", "STOP", ""),
    ],
)
def test_text_before_the_string_is_kept(text: str, string: str, shown: str) -> None:
    given = stops("never", string)
    ids = encode(text)
    end = next(count for count in range(1, len(ids) + 1) if given.found(ids[:count]))
    assert given.found(ids[:end]) == string
    assert decode(given.cut(ids[:end], string)) == shown


def test_a_string_is_looked_for_at_the_end_only() -> None:
    given = stops("fox")
    assert given.found(encode("the fox")) == "fox"
    assert given.found(encode("the fox" + " jumps over the lazy dog" * 3)) is None
    assert stops().found(encode("fox")) is None


def streamed(text: str, given: StopStrings, ending: str | None) -> list[str]:
    """What a reader has seen after each token."""
    gate, shown, seen = StopGate(given), [], []
    ids = encode(text)
    for token in ids[:-1]:
        shown += gate.feed([token])
        seen.append(decode(shown))
    shown += gate.finish(ids[-1:], ending)
    return [*seen, decode(shown)]


def test_no_part_of_a_stop_string_is_streamed() -> None:
    seen = streamed("abc STOP", stops("STOP"), "STOP")
    assert seen[-1] == "abc "
    assert all("abc ".startswith(text) for text in seen)


def test_what_only_looked_like_one_is_streamed_after_all() -> None:
    assert streamed("S ST STO stop", stops("STOP"), None)[-1] == "S ST STO stop"


def test_without_stop_strings_nothing_is_held_back() -> None:
    seen = streamed("abc STOP", stops(), None)
    assert [len(text) for text in seen] == sorted({len(text) for text in seen})
