"""The self-check's kinds of differences."""

from __future__ import annotations

import pytest

from helpers.chat_tokenizer import END_OF_TEXT, IM_END, IM_START, NEWLINE, chat_family, encode
from miles_core.tito import compare_tokens

FAMILY = chat_family()
TEXT = (
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n<think>\nWell.\n</think>\n\nFine.<|im_end|>\n"
    "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n<think>\nEnd.\n</think>\n\nHAVING<|im_end|>\n"
)
IDS = encode(TEXT)


def kinds(actual: list[int]) -> list[str]:
    found = compare_tokens(FAMILY, IDS, actual)
    for difference in found:
        assert set(difference) == {"type", "segment_index", "expected_text", "actual_text", "detail"}
    return [difference["type"] for difference in found]


def replaced(old: str, new: str) -> list[int]:
    assert old in TEXT
    return encode(TEXT.replace(old, new))


def test_equal() -> None:
    assert kinds(IDS) == []
    assert kinds(list(IDS)) == []
    assert compare_tokens(FAMILY, [], []) == []


@pytest.mark.parametrize("tail", [[], [NEWLINE], [IM_END], [IM_END, NEWLINE], [END_OF_TEXT], [END_OF_TEXT, NEWLINE]])
def test_trailing_stop_tokens_do_not_count(tail: list[int]) -> None:
    bare = IDS[:-2]
    assert kinds([*bare, *tail]) == []
    assert compare_tokens(FAMILY, [*bare, *tail], IDS) == []


def test_the_structure_is_reported_alone() -> None:
    extra = [*IDS[:3], IM_START, *IDS[3:]]
    (difference,) = compare_tokens(FAMILY, IDS, extra)
    assert difference["type"] == "special_token_count"
    assert "expected 7 special tokens, found 8" in difference["detail"]
    assert kinds([*replaced("Hello", "Hullo")[3:]]) == ["special_token_count"]
    assert kinds([]) == ["special_token_count"]


def test_another_special_token() -> None:
    actual = list(IDS)
    at = actual.index(IM_END)
    actual[at] = END_OF_TEXT
    assert kinds(actual) == ["special_token_type"]


def test_text_of_others() -> None:
    (difference,) = compare_tokens(FAMILY, IDS, replaced("Hello", "Hullo"))
    assert difference["type"] == "non_assistant_text"
    assert difference["expected_text"] == "<|im_start|>user\nHello"
    assert difference["actual_text"] == "<|im_start|>user\nHullo"
    assert difference["segment_index"] == 1


def test_sampled_text_is_harmless() -> None:
    assert kinds(replaced("Fine.", "Finer.")) == ["assistant_text"]
    canonical, halves = encode("HAVING"), [*encode("H"), *encode("AVING")]
    at = next(i for i in range(len(IDS)) if IDS[i : i + len(canonical)] == canonical)
    (difference,) = compare_tokens(FAMILY, IDS, [*IDS[:at], *halves, *IDS[at + len(canonical) :]])
    assert difference["type"] == "assistant_text"
    assert difference["expected_text"] == difference["actual_text"]
    assert difference["detail"] == "same text, other tokens"


def test_what_was_sampled_is_harmless_wherever_it_stands() -> None:
    """As after tool results of a format that opens no turn for the assistant."""
    at = IDS.index(encode("Hello")[0])
    other = replaced("Hello", "Hullo")
    size = len(other) - len(IDS) + 1

    def kind(actual: list[int], *sampled: tuple[int, int]) -> list[str]:
        return [difference["type"] for difference in compare_tokens(FAMILY, IDS, actual, sampled)]

    assert kind(other, (at, at + size)) == ["assistant_text"]
    assert kind(other, (0, 2), (at, at + size)) == ["assistant_text"]
    assert kind(other, (at - 1, at)) == ["non_assistant_text"]
    assert kind(other, (at + 1, at + size + 3)) == ["non_assistant_text"]
    # what is missing behind the last sampled token was not sampled
    missing = [*IDS[:at], *IDS[at + 1 :]]
    assert kind(missing, (0, at)) == ["non_assistant_text"]
    assert kind(missing, (0, at + 1)) == ["assistant_text"]


def test_every_difference_is_listed() -> None:
    actual = encode(TEXT.replace("Hello", "Hullo").replace("Fine.", "Good.").replace("Bye", "By"))
    assert kinds(actual) == ["non_assistant_text", "assistant_text", "non_assistant_text"]


def test_ids_without_text_do_not_matter() -> None:
    assert kinds([*IDS[:2], 151_900, *IDS[2:]]) == ["non_assistant_text"]
