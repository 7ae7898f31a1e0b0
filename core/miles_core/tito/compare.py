"""The self-check: a session's tokens against the template's rendering of its messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles_core.tito.bound import BoundFamily

Difference = dict[str, Any]
"""`{type, segment_index, expected_text, actual_text, detail}`"""


def compare_tokens(bound: BoundFamily, expected: Sequence[int], actual: Sequence[int]) -> list[Difference]:
    """Differences between two token sequences, cut into segments at special tokens.

    `special_token_count` (reported alone), `special_token_type` and `non_assistant_text` mean a fault;
    `assistant_text` is harmless: the sampled text is not what tokenizing it again would give. Trailing stop
    tokens are ignored on both sides.
    """
    want = _segments(_without_trailing(expected, bound.trailing_ids), bound.boundary_ids)
    have = _segments(_without_trailing(actual, bound.trailing_ids), bound.boundary_ids)
    if want == have:
        return []
    if len(want) != len(have):
        return [_count_difference(bound, want, have)]
    return [
        difference
        for index, (left, right) in enumerate(zip(want, have, strict=True))
        if left != right
        for difference in _segment_differences(bound, index, left, right)
    ]


Segment = tuple[int | None, tuple[int, ...]]


def _without_trailing(ids: Sequence[int], trailing: frozenset[int]) -> Sequence[int]:
    end = len(ids)
    while end and ids[end - 1] in trailing:
        end -= 1
    return ids[:end]


def _segments(ids: Sequence[int], boundaries: frozenset[int]) -> list[Segment]:
    """`(special id or None, the ids behind it)`; the first segment has no special id."""
    out: list[Segment] = []
    special: int | None = None
    start = 0
    for at, token in enumerate(ids):
        if token in boundaries:
            out.append((special, tuple(ids[start:at])))
            special, start = token, at + 1
    out.append((special, tuple(ids[start:])))
    return out


def _count_difference(bound: BoundFamily, want: list[Segment], have: list[Segment]) -> Difference:
    index = next(
        (i for i, (a, b) in enumerate(zip(want, have, strict=False)) if a[0] != b[0]),
        min(len(want), len(have)),
    )
    return {
        "type": "special_token_count",
        "segment_index": index,
        "expected_text": _text(bound, want[index]) if index < len(want) else "",
        "actual_text": _text(bound, have[index]) if index < len(have) else "",
        "detail": f"expected {len(want) - 1} special tokens, found {len(have) - 1}; "
        f"the first difference is in segment {index}",
    }


def _segment_differences(bound: BoundFamily, index: int, left: Segment, right: Segment) -> list[Difference]:
    expected, actual = _text(bound, left), _text(bound, right)
    if left[0] != right[0]:
        kind, detail = "special_token_type", f"expected token {left[0]}, found {right[0]}"
    else:
        opener = bound.family.assistant_opener
        kind = "assistant_text" if opener is not None and actual.startswith(opener) else "non_assistant_text"
        detail = "same text, other tokens" if expected == actual else "the text differs"
    return [
        {
            "type": kind,
            "segment_index": index,
            "expected_text": expected,
            "actual_text": actual,
            "detail": detail,
        }
    ]


def _text(bound: BoundFamily, segment: Segment) -> str:
    special, ids = segment
    return bound.tokenizer.decode([*([special] if special is not None else []), *ids])
