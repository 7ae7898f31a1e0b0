"""A session's history: an append-only forest of generations that shares everything it can.

A node holds only what is new in its turn. Its token sequence is its parent's first `kept` ids, then `added`
(what the prompt brought), then `sampled`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import orjson

from miles_core.session.answer import Answer
from miles_core.session.index import PathIndex
from miles_core.session.line import Line
from miles_core.session.long_text import LIST_AT_ONCE
from miles_core.session.tip import Tip
from miles_core.types import Message, Tool


@dataclass(slots=True, kw_only=True)
class TurnFacts:
    """What the engine and the clock say about a generation; times are seconds since the epoch.

    `weight_versions` has one entry, or several in order where weights were updated inside the generation.
    """

    finish_reason: str
    response_id: str | None
    prompt_tokens: int
    cached_tokens: int
    weight_versions: tuple[str, ...]
    version_ends: tuple[int, ...]
    """Where the sampled tokens of each of `weight_versions` end; empty where that is not known."""
    spec: dict[str, int]
    request_timestamp: float
    timestamp: float


@dataclass(slots=True, kw_only=True, eq=False)
class Node:
    """One generation: the messages since its parent, its new tokens, and what is known about the turn.

    `added` and `sampled` are int32 arrays, `log_probs` float64 with one entry per sampled id. `messages` ends
    with the assistant message that was sampled. `request` holds the fields sent to the engine apart from
    messages and ids. `encoded` is how many ids at the end of `added` came from one text.
    """

    id: int
    seq: int
    parent: Node | None
    messages: tuple[Message, ...]
    kept: int
    added: array[int]
    sampled: array[int]
    log_probs: array[float]
    tools: Sequence[Tool] | None
    request: dict[str, Any]
    answer: Answer
    facts: TurnFacts
    encoded: int = 0
    num_messages: int = field(init=False)
    prompt_length: int = field(init=False)
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_messages = len(self.messages) + (self.parent.num_messages if self.parent else 0)
        self.prompt_length = self.kept + len(self.added)
        self.num_tokens = self.prompt_length + len(self.sampled)

    @property
    def truncated(self) -> bool:
        """Whether the generation ended for length."""
        return self.facts.finish_reason == "length"

    def path(self) -> list[Node]:
        """The generations from the root to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def tokens(self) -> array[int]:
        """The checkpoint: prompt ids of this turn and the sampled ids behind them, int32."""
        ids: array[int] = array("i")
        for node in self.path():
            if node.kept < len(ids):
                del ids[node.kept :]
            ids += node.added
            ids += node.sampled
        return ids


class Forest:
    """The generations of one session, in order of commit."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._children: dict[int | None, list[Node]] = {}
        self._tools: dict[bytes, Sequence[Tool]] = {}
        self.index = PathIndex()
        """The paths by their messages' keys; kept up by policies that look generations up in it."""
        self.committed = 0
        """How many turns were ever committed; also the next node's id and `seq`."""
        self.tip = Tip()
        """The last generation's path."""
        self.line: Line | None = None
        """A path written out: the last generation's, or one that was asked for."""

    def frozen(self) -> Forest:
        """A copy that holds what is committed now, for another thread to read."""
        other = Forest()
        other.nodes, other.committed = list(self.nodes), self.committed
        other._children = {place: list(nodes) for place, nodes in self._children.items()}
        return other

    def line_to(self, node: Node | None) -> Line | None:
        """The path to `node` written out, if it is there."""
        return self.line if self.line is not None and self.line.node is node else None

    @property
    def last(self) -> Node | None:
        """The node committed last."""
        return self.nodes[-1] if self.nodes else None

    def add(self, node: Node) -> None:
        """Append a committed generation."""
        self._link(node)
        self.tip.move(node)
        self.committed += 1

    def _link(self, node: Node) -> None:
        self.nodes.append(node)
        self._children.setdefault(node.parent.id if node.parent else None, []).append(node)

    def known_tools(self, tools: Sequence[Tool] | None, key: bytes | None) -> Sequence[Tool] | None:
        """The stored list of that key, else `tools` itself: equal tools of a forest are one object."""
        return tools if tools is None or key is None else self._tools.get(key, tools)

    def keep_tools(self, tools: Sequence[Tool] | None, key: bytes | None) -> Sequence[Tool] | None:
        """The same, for tools of a generation that is about to be added: they are stored."""
        return tools if tools is None or key is None else self._tools.setdefault(key, tools)

    def children(self, node: Node | None) -> Sequence[Node]:
        """The generations that extend `node` (None: the roots), in order of commit."""
        return self._children.get(node.id if node else None, ())

    def leaves(self) -> list[Node]:
        """The generations that none extends, in order of commit."""
        return [node for node in self.nodes if node.id not in self._children]

    def forget_all_but(self, kept: Sequence[Node]) -> None:
        """Let go of generations that no path needs any more (linear histories)."""
        self.nodes, self._children = [], {}
        for node in kept:
            self._link(node)
        used = [node.tools for node in kept]
        self._tools = {key: tools for key, tools in self._tools.items() if any(tools is other for other in used)}


def tools_key(tools: Sequence[Tool]) -> bytes:
    """Equal for tools that are equal as JSON values (true is not 1); `tools` as `normalise_tools` gives them."""
    digest = blake2b(digest_size=32)
    for at in range(0, len(tools), LIST_AT_ONCE):
        digest.update(orjson.dumps(tools[at : at + LIST_AT_ONCE], option=orjson.OPT_SORT_KEYS))
    return digest.digest()


def path_messages(node: Node | None) -> Iterator[Message]:
    """Stored messages from the root to `node`, in order."""
    if node is not None:
        for step in node.path():
            yield from step.messages


def encoded_spans(node: Node) -> list[tuple[int, int]]:
    """Where in a generation's tokens there are ids that came from text, each span from one text."""
    found: list[tuple[int, int]] = []
    for step in node.path():
        while found and found[-1][1] > step.kept:  # the generation keeps less of what is before it
            start, _ = found.pop()
            if start < step.kept:
                found.append((start, step.kept))
        found.append((step.prompt_length - step.encoded, step.prompt_length))
    return found
