"""Where a request stands in a session's history. Linear and tree histories are two policies over one forest."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from miles_core.errors import HistoryError, TruncatedHistory
from miles_core.session.sharing import spelled_alike
from miles_core.session.tree import Forest, Node
from miles_core.types import Message, Tool

Matcher = Callable[[Message, Message], bool]
"""`(stored, replayed) -> bool`; a fault in it is raised, never read as an answer."""

MessageKey = Callable[[Message], Hashable]
"""What a matcher sorts messages by: equal for any two that it calls the same."""

Keys = Sequence[Hashable] | None
"""Those of several messages; None where none are asked for."""


@dataclass(frozen=True, slots=True)
class Position:
    """The generation a request extends (None: it starts anew) and the messages it adds there."""

    base: Node | None
    appended: tuple[Message, ...]
    head: Node | None
    """The session's last generation when the request was positioned."""
    discarded: int = 0
    """How many generations a commit would replace (linear histories)."""
    diverged: int | None = None
    """Index of the first stored message that the request contradicts; None if it contradicts none."""


class HistoryPolicy(Protocol):
    """How requests attach to a forest and what a commit leaves of it."""

    def same(self, matches: Matcher) -> Matcher:
        """How one request's messages are told from those of the forest's tip."""
        ...

    def position(
        self,
        forest: Forest,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        matches: Matcher,
        repeated: int = 0,
    ) -> Position:
        """Place a request; `tools` are None if it names none, and `forest`'s own object if it knows equal ones.

        `repeated` is how many of the first messages the forest's tip knows to match its own. Raises HistoryError if it
        fits nowhere.
        """
        ...

    def accepts(self, forest: Forest, position: Position) -> bool:
        """Whether a turn that was positioned earlier may still be committed."""
        ...

    def keys(self, messages: Sequence[Message]) -> Keys:
        """What a commit needs to know of new messages. Looks at no session: any thread may do it."""
        ...

    def commit(self, forest: Forest, node: Node, keys: Keys) -> None:
        """Put a finished generation into the forest; `keys` are those of its messages but the last."""
        ...


class LinearPolicy:
    """One line of turns. A request may roll back at most `max_rollback` generations."""

    def __init__(self, max_rollback: int = 1) -> None:
        self.max_rollback = max_rollback

    def same(self, matches: Matcher) -> Matcher:
        """As the matcher says."""
        return matches

    def position(
        self,
        forest: Forest,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        matches: Matcher,
        repeated: int = 0,
    ) -> Position:
        """Behind everything stored if it all matches, else behind the last generation that does."""
        head, stored = forest.last, len(forest.tip.messages)
        match = forest.tip.match(messages, repeated, matches)
        base, discarded = head, 0
        while base is not None and base.num_messages > match:
            base, discarded = base.parent, discarded + 1
        if discarded > self.max_rollback:
            raise HistoryError(
                f"rollback failed: discard_count={discarded} exceeds "
                f"max_assistant_rollback_steps={self.max_rollback} (stored has {stored} messages, "
                f"request has {len(messages)} messages)"
            )
        diverged = match if match < min(stored, len(messages)) else None
        appended = tuple(messages[base.num_messages if base else 0 :])
        return Position(base, appended, head, discarded=discarded, diverged=diverged)

    def accepts(self, forest: Forest, position: Position) -> bool:
        """Only while no other turn was committed since."""
        return forest.last is position.head

    def keys(self, messages: Sequence[Message]) -> Keys:
        """None."""
        return None

    def commit(self, forest: Forest, node: Node, keys: Keys) -> None:
        """The new generation becomes the end of the line; a turn it replaced is let go."""
        forest.add(node)
        if len(forest.nodes) > 1 and forest.nodes[-2] is not node.parent:
            forest.forget_all_but(node.path())


class TreePolicy:
    """A forest that only grows: a request extends the deepest generation it agrees with, or starts a new root."""

    def __init__(self, max_nodes: int = 1024, key: MessageKey | None = None) -> None:
        self.max_nodes = max_nodes
        self._key = key
        """Narrows down which generations the matcher is asked about; without it, it is asked about all."""

    def same(self, matches: Matcher) -> Matcher:
        """As the matcher says, of messages whose keys are equal."""
        key = self._key
        if key is None:
            return matches
        # what is spelled alike has one key, which takes longer to make
        return lambda stored, sent: (spelled_alike(stored, sent) or key(stored) == key(sent)) and matches(stored, sent)

    def position(
        self,
        forest: Forest,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        matches: Matcher,
        repeated: int = 0,
    ) -> Position:
        """Behind the generation whose path matches the most leading messages; among equals the one committed last.

        A request with tools extends only generations rendered with the same ones. Raises HistoryError (400) at the
        node limit, TruncatedHistory (409) if that generation ended for length.
        """
        self._check_room(forest)
        base = self._deepest(forest, messages, tools, matches, repeated)
        if base is not None and base.truncated:
            raise TruncatedHistory(
                f"generation {base.id} ended for length, and a cut-off answer cannot be extended; repeat the request "
                "without it, or allow it more tokens"
            )
        return Position(base, tuple(messages[base.num_messages if base else 0 :]), forest.last)

    def _deepest(
        self,
        forest: Forest,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        matches: Matcher,
        repeated: int,
    ) -> Node | None:
        key = self._key
        if key is None:
            return _deepest_of_all(forest, tools, _Agreement(messages, matches))
        asked = _asked_once(matches)
        match = forest.tip.match(messages, repeated, self.same(asked))
        known = forest.tip.reached(match)
        agreement = _Agreement(messages, asked, known)
        # the keys of messages that match lead along the tip's path: the search goes on from there
        places = [known, None] if known is not None else [None]
        for place in places:
            keys = map(key, messages[place.num_messages if place else 0 :])
            for ends in reversed(forest.index.along(keys, place)):
                for node in reversed(ends):
                    if (tools is None or node.tools is tools) and agreement.with_path_of(node):
                        return node
        return None

    def _check_room(self, forest: Forest) -> None:
        if len(forest.nodes) >= self.max_nodes:
            raise HistoryError(f"the session's tree has {len(forest.nodes)} generations, the most it may have")

    def accepts(self, forest: Forest, position: Position) -> bool:
        """Always, while there is room: a turn from an old place becomes a sibling."""
        return len(forest.nodes) < self.max_nodes

    def keys(self, messages: Sequence[Message]) -> Keys:
        """Those by which the messages will be found."""
        return None if self._key is None else [self._key(message) for message in messages]

    def commit(self, forest: Forest, node: Node, keys: Keys) -> None:
        """One more generation; nothing is ever let go."""
        sampled = self.keys(node.messages[-1:])
        forest.add(node)
        if keys is not None and sampled is not None:
            forest.index.add(node, [*keys, *sampled])


def _asked_once(matches: Matcher) -> Matcher:
    """The matcher for one request, which is asked about two messages once."""
    answers: dict[tuple[int, int], bool] = {}

    def asked(stored: Message, replayed: Message) -> bool:
        pair = (id(stored), id(replayed))
        if pair not in answers:
            answers[pair] = matches(stored, replayed)
        return answers[pair]

    return asked


class _Agreement:
    """Whether a request's messages begin with those of a generation's path; asks about each generation once.

    `known` is a generation about whose path that is known.
    """

    def __init__(self, messages: Sequence[Message], matches: Matcher, known: Node | None = None) -> None:
        self._messages = messages
        self._matches = matches
        self._known = {known.id: True} if known is not None else {}

    def with_own(self, node: Node) -> bool:
        """The messages that the generation brought."""
        if node.num_messages > len(self._messages):
            return False
        start = node.num_messages - len(node.messages)
        return all(map(self._matches, node.messages, self._messages[start : node.num_messages]))

    def with_path_of(self, node: Node) -> bool:
        """The messages from the root on."""
        steps: list[Node] = []
        step: Node | None = node
        while step is not None and step.id not in self._known:
            steps.append(step)
            step = step.parent
        agrees = step is None or self._known[step.id]
        for step in reversed(steps):
            agrees = self._known[step.id] = agrees and self.with_own(step)
        return agrees


def _deepest_of_all(forest: Forest, tools: Sequence[Tool] | None, agreement: _Agreement) -> Node | None:
    best: Node | None = None
    waiting = [node for node in forest.children(None) if tools is None or node.tools is tools]
    while waiting:
        node = waiting.pop()
        if agreement.with_own(node):
            if best is None or (node.num_messages, node.seq) > (best.num_messages, best.seq):
                best = node
            waiting.extend(forest.children(node))
    return best
