"""The radix tree of keys and values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from miles_engines.local_server.kv import Segment
from miles_engines.local_server.prefix_cache import PrefixCache, Tokens


def kv_of(tokens: list[int]) -> Segment:
    """A segment in which each token's keys and values are its own number."""
    values = torch.tensor(tokens, dtype=torch.float32)[:, None, None]
    return Segment(((values, values + 0.5),))


def insert(cache: PrefixCache, tokens: list[int]) -> None:
    cache.insert(tokens, lambda start, stop: kv_of(tokens[start:stop]))


def array(tokens: list[int]) -> Tokens:
    return np.asarray(tokens, np.int64)


def stored(cache: PrefixCache, tokens: list[int]) -> list[int]:
    """What `match` gives, read back as tokens."""
    return [int(number) for segment in cache.match(array(tokens)) for number in segment.layers[0][0].flatten()]


def test_longest_common_beginning_is_found() -> None:
    cache = PrefixCache()
    insert(cache, [1, 2, 3, 4])
    insert(cache, [1, 2, 9])
    assert stored(cache, [1, 2, 3, 4, 5]) == [1, 2, 3, 4]
    assert stored(cache, [1, 2, 9, 9]) == [1, 2, 9]
    assert stored(cache, [1, 2, 3]) == [1, 2, 3]
    assert stored(cache, [1, 7]) == [1]
    assert stored(cache, [7]) == []
    assert cache.tokens == 5


def test_only_what_is_missing_is_read() -> None:
    cache = PrefixCache()
    asked: list[tuple[int, int]] = []

    def read(start: int, stop: int) -> Segment:
        asked.append((start, stop))
        return kv_of([1, 2, 3, 4][start:stop])

    cache.insert([1, 2], read)
    cache.insert([1, 2, 3, 4], read)
    cache.insert([1, 2, 3], read)
    assert asked == [(0, 2), (2, 4)]


def test_matching_leaves_the_tree_as_it_is() -> None:
    cache = PrefixCache()
    insert(cache, [1, 2, 3, 4])
    for size in (1, 2, 3):
        assert len(cache.match(array([1, 2, 3, 4][:size]))) == 1
    assert len(cache.match(array([1, 2, 3, 4]))) == 1


def test_least_recently_used_goes_first() -> None:
    cache = PrefixCache(max_tokens=6)
    insert(cache, [1, 1, 1])
    insert(cache, [2, 2, 2])
    cache.match(array([1, 1, 1]))
    insert(cache, [3, 3])
    assert stored(cache, [2, 2, 2]) == []
    assert stored(cache, [1, 1, 1]) == [1, 1, 1]
    assert stored(cache, [3, 3]) == [3, 3]
    assert cache.tokens == 5


def test_a_limit_in_bytes() -> None:
    cache = PrefixCache(max_bytes=8 * 5)
    insert(cache, [1, 1, 1])
    insert(cache, [2, 2, 2])
    assert stored(cache, [1, 1, 1]) == []
    assert stored(cache, [2, 2, 2]) == [2, 2, 2]


def test_a_shared_beginning_outlives_its_branches() -> None:
    cache = PrefixCache(max_tokens=7)
    insert(cache, [1, 2, 3])
    insert(cache, [1, 2, 4, 4])
    insert(cache, [1, 2, 5, 5, 5])
    assert stored(cache, [1, 2, 5, 5, 5]) == [1, 2, 5, 5, 5]
    assert stored(cache, [1, 2, 3]) == [1, 2]


@pytest.mark.parametrize("limit", [{"max_tokens": 0}, {"max_bytes": 0}])
def test_nothing_is_kept_at_a_limit_of_zero(limit: dict[str, int]) -> None:
    cache = PrefixCache(**limit)
    insert(cache, [1, 2])
    assert not cache.enabled
    assert cache.match_length(array([1, 2])) == 0


def test_clear_forgets_everything() -> None:
    cache = PrefixCache()
    insert(cache, [1, 2])
    cache.clear()
    assert cache.tokens == 0
    assert cache.match_length(array([1, 2])) == 0
