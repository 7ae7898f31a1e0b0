"""The self-check: a session's tokens against the template's rendering of its messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles_core.tito.bound import BoundFamily

Difference = dict[str, Any]
"""`{type, segment_index, expected_text, actual_text, detail}`"""


Span = tuple[int, int]
"""Start and end of tokens in a sequence."""


def compare_tokens(
    bound: BoundFamily, expected: Sequence[int], actual: Sequence[int], sampled: Sequence[Span] = ()
) -> list[Difference]:
    """Differences between two token sequences, cut into segments at special tokens.

    `special_token_count` (reported alone), `special_token_type` and `non_assistant_text` mean a fault;
    `assistant_text` is harmless: the sampled text is not what tokenizing it again would give. That is a segment that
    the assistant opener begins, or a difference inside `sampled`, the spans of `actual` that the model sampled, where
    they are known. Trailing stop tokens are ignored on both sides.
    """
    expected = _without_trailing(expected, bound.trailing_ids)
    actual = _without_trailing(actual, bound.trailing_ids)
    if expected == actual:  # at the speed of memory, where both are arrays
        return []
    want, have = _segments(expected, bound.boundary_ids), _segments(actual, bound.boundary_ids)
    if want == have:
        return []
    if len(want) != len(have):
        return [_count_difference(bound, want, have)]
    found, start = [], 0
    for index, (left, right) in enumerate(zip(want, have, strict=True)):
        start += right[0] is not None
        if left != right:
            found.append(_segment_difference(bound, index, left, right, [(a - start, b - start) for a, b in sampled]))
        start += len(right[1])
    return found


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


def _segment_difference(
    bound: BoundFamily, index: int, left: Segment, right: Segment, sampled: Sequence[Span]
) -> Difference:
    """How two segments differ; `sampled` counts from behind the special token of the second."""
    expected, actual = _text(bound, left), _text(bound, right)
    if left[0] != right[0]:
        kind, detail = "special_token_type", f"expected token {left[0]}, found {right[0]}"
    else:
        opener = bound.family.assistant_opener
        harmless = opener is not None and actual.startswith(opener)
        harmless = harmless or _in_sampled(left[1], right[1], sampled, same_text=expected == actual)
        kind = "assistant_text" if harmless else "non_assistant_text"
        detail = "same text, other tokens" if expected == actual else "the text differs"
    return {
        "type": kind,
        "segment_index": index,
        "expected_text": expected,
        "actual_text": actual,
        "detail": detail,
    }


def _in_sampled(want: Sequence[int], have: Sequence[int], sampled: Sequence[Span], *, same_text: bool) -> bool:
    """Whether all that differs in `have` was sampled; of the same text, whether some of it was."""
    most = min(len(want), len(have))
    first = next((at for at in range(most) if want[at] != have[at]), most)
    last = next((at for at in range(most - first) if want[-1 - at] != have[-1 - at]), most - first)
    start, end = first, len(have) - last
    if same_text:
        return any(start < b and a < end for a, b in sampled)
    return any(a <= start and end <= b and (start < end or a < start < b) for a, b in sampled)


def _text(bound: BoundFamily, segment: Segment) -> str:
    special, ids = segment
    return bound.tokenizer.decode([*([special] if special is not None else []), *ids])
