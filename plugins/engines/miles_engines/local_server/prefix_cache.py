"""Keys and values of past sequences, kept by their tokens so that the next prompt need not recompute them.

A radix tree: an edge is a run of tokens with their keys and values, and sequences with a common beginning
share its edges. Least recently used leaves go first when the cache is over its budget.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from miles_engines.local_server.kv import Segment

EVICT_TO = 0.9
"""Evict down to this share of the limit, so that not every insertion has to look for the oldest leaf."""

Tokens = npt.NDArray[np.int64]


@dataclass(eq=False)
class _Node:
    tokens: Tokens
    segment: Segment | None
    parent: _Node | None
    children: dict[int, _Node] = field(default_factory=dict)
    used: int = 0


class PrefixCache:
    """Stores sequences, finds the longest stored beginning of a new one.

    Used by the scheduler's thread alone. `max_tokens` or `max_bytes` limits it; a limit of 0 keeps nothing.
    """

    def __init__(self, *, max_tokens: int | None = None, max_bytes: int | None = None) -> None:
        self.tokens = 0
        self._bytes = 0
        self._max_tokens = max_tokens
        self._max_bytes = max_bytes
        self._clock = itertools.count(1)
        self._root = _Node(np.empty(0, np.int64), None, None)

    @property
    def enabled(self) -> bool:
        """Whether it keeps anything at all."""
        return self._max_tokens != 0 and self._max_bytes != 0

    def match(self, tokens: Tokens) -> list[Segment]:
        """Keys and values of the longest stored beginning of `tokens`, as consecutive segments."""
        found = []
        for node, shared in self._walk(tokens):
            node.used = next(self._clock)
            assert node.segment is not None  # only the root has none
            found.append(node.segment.part(0, shared))
        return found

    def match_length(self, tokens: Tokens) -> int:
        """How many leading tokens are stored."""
        return sum(shared for _, shared in self._walk(tokens))

    def insert(self, tokens: Sequence[int], read: Callable[[int, int], Segment]) -> None:
        """Store a sequence. `read(start, stop)` gives a copy of the keys and values that are still missing."""
        if not self.enabled:
            return
        array = np.asarray(tokens, np.int64)
        path = self._walk(array)
        depth = sum(shared for _, shared in path)
        for node, _ in path:
            node.used = next(self._clock)
        if depth < len(array):
            parent = self._branching_point(path)
            leaf = _Node(array[depth:], read(depth, len(array)), parent, used=next(self._clock))
            parent.children[int(array[depth])] = leaf
            self._count(leaf, 1)
            self._evict()

    def clear(self) -> None:
        """Forget everything, e.g. because the weights changed."""
        self.tokens = self._bytes = 0
        self._root = _Node(np.empty(0, np.int64), None, None)

    def _walk(self, tokens: Tokens) -> list[tuple[_Node, int]]:
        """Follow `tokens` down: the edges on the way, and how many tokens of each agree."""
        node, depth, path = self._root, 0, []
        while depth < len(tokens):
            child = node.children.get(int(tokens[depth]))
            if child is None:
                break
            shared = common_length(child.tokens, tokens[depth:])
            path.append((child, shared))
            if shared < len(child.tokens):
                break
            node, depth = child, depth + shared
        return path

    def _branching_point(self, path: list[tuple[_Node, int]]) -> _Node:
        if not path:
            return self._root
        node, shared = path[-1]
        return node if shared == len(node.tokens) else self._split(node, shared)

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut an edge in two; returns the upper part."""
        assert node.segment is not None  # as above
        assert node.parent is not None
        upper = _Node(node.tokens[:at], node.segment.part(0, at).copy(), node.parent, used=node.used)
        node.parent.children[int(node.tokens[0])] = upper
        # copies: a part that shared the whole edge's memory would keep it alive after the other is evicted
        node.segment = node.segment.part(at, len(node.tokens)).copy()
        node.tokens, node.parent = node.tokens[at:].copy(), upper
        upper.children[int(node.tokens[0])] = node
        return upper

    def _count(self, node: _Node, sign: int) -> None:
        assert node.segment is not None
        self.tokens += sign * len(node.tokens)
        self._bytes += sign * node.segment.nbytes

    def _over(self, share: float = 1.0) -> bool:
        too_many = self._max_tokens is not None and self.tokens > self._max_tokens * share
        return too_many or (self._max_bytes is not None and self._bytes > self._max_bytes * share)

    def _evict(self) -> None:
        if not self._over():
            return
        heap = [(leaf.used, id(leaf), leaf) for leaf in self._leaves()]
        heapq.heapify(heap)
        while heap and self._over(EVICT_TO):
            _, _, leaf = heapq.heappop(heap)
            parent = leaf.parent
            assert parent is not None  # the root is never a leaf of this walk
            del parent.children[int(leaf.tokens[0])]
            self._count(leaf, -1)
            if parent is not self._root and not parent.children:
                heapq.heappush(heap, (parent.used, id(parent), parent))

    def _leaves(self) -> Iterator[_Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            if node.children:
                stack.extend(node.children.values())
            else:
                yield node


def common_length(left: Tokens, right: Tokens) -> int:
    """How many leading entries are equal."""
    size = min(len(left), len(right))
    differing = np.flatnonzero(left[:size] != right[:size])
    return int(differing[0]) if len(differing) else size
