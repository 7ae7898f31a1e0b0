"""Checks of model families beyond how turns join: facts borne out by the template, any ids, settings, lengths."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations, product
from typing import Any, overload

from miles_core.errors import RenderError, RequestError
from miles_core.plugins import Plugin
from miles_core.testing.conformance.family import bound_revisions
from miles_core.testing.conformance.report import CheckFunction, Skip
from miles_core.testing.verify import CHECKS as VERIFIED
from miles_core.testing.verify import LOOK_UP, Outcome, verify
from miles_core.tito import BoundFamily
from miles_core.types import Message

SELF_CHECK = VERIFIED[2]

ROUNDS, LONGEST = 200, 60
"""How many made-up generations are read, and how many ids they have at most."""

LOOKED_AT = 64
"""How many ids of a checkpoint joining may look at, however long it is."""

SHORT, LONG = 1_000, 8_000
"""Lengths of two generations; reading the long one may take `MOST_TIMES` as long."""
MOST_TIMES = 3.0 * LONG / SHORT

_TALK: list[Message] = [
    {"role": "user", "content": "Where is Emma?"},
    {"role": "assistant", "content": "On shelf 12.", "reasoning_content": "Found it."},
    {"role": "user", "content": "And Ulysses?"},
]
_CALLED: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "functions.look_up:0",
            "type": "function",
            "function": {"name": "look_up", "arguments": '{"title": "Emma"}'},
        }
    ],
}
_NOT_BOUND = Skip("no revision could be bound")


def names_what_it_writes(plugin: Plugin) -> str | Skip | None:
    """The texts that its facts name stand in what its template writes; a misspelt one would never be met."""
    made = False
    for bound in bound_revisions(plugin):
        made = True
        family, facts = bound.family, bound.parse_facts
        prompt, history = bound.render(_TALK[:1]), bound.render(_TALK[:2], None, None, False)
        named = [("assistant_opener", family.assistant_opener, prompt), ("turn_end", family.turn_end, history)]
        if facts.calls is not None:
            called = bound.render([_TALK[0], _CALLED], [LOOK_UP], None, False)
            named.append(("parse_facts.calls", facts.calls.opener, called))
        for fact, text, written in named:
            if text and text not in written:
                fault = f"{fact} is {text!r}, which its template does not write: {written!r}"
                return f"revision {bound.revision.name}: {fault}"
    return None if made else _NOT_BOUND


def passes_the_self_check(plugin: Plugin) -> str | Skip | None:
    """What a session would say of itself in `tito_session_mismatch` is nothing, on every trajectory of `verify`."""
    made = False
    for bound in bound_revisions(plugin):
        made = True
        for tried in verify(bound, thinking="on").tried:
            found = tried.findings.get(SELF_CHECK)
            if found is not None and found.outcome is Outcome.FAIL:
                return f"revision {bound.revision.name}, {tried.trajectory}: {found.reason}"
    return None if made else _NOT_BOUND


def reads_any_ids(plugin: Plugin) -> str | Skip | None:
    """Whatever is sampled is read as a message, the same at once and id by id; nothing raises."""
    made = False
    for bound in bound_revisions(plugin):
        made = True
        for ids in _made_up(bound):
            fault = _reading_fault(bound, ids)
            if fault is not None:
                text = bound.tokenizer.decode(ids)
                return f"revision {bound.revision.name}, sampled {text!r} ({ids[:8]}…): {fault}"
    return None if made else _NOT_BOUND


def _made_up(bound: BoundFamily) -> Iterator[list[int]]:
    """Ids at random, control tokens more often than chance has it, and ids that the tokenizer does not know."""
    chance = random.Random(0)
    control = sorted(bound.tokenizer.added_tokens.values())
    size = bound.tokenizer.vocab_size
    yield []
    for _ in range(ROUNDS):
        kinds = (lambda: chance.choice(control), lambda: chance.randrange(size), lambda: size + chance.randrange(9))
        yield [chance.choices(kinds, (5, 5, 1))[0]() for _ in range(chance.randint(1, LONGEST))]


def _reading_fault(bound: BoundFamily, ids: Sequence[int]) -> str | None:
    try:
        message = bound.parse(ids, [LOOK_UP])
        parser = bound.parser([LOOK_UP])
        for token in ids:
            parser.feed([token])
        parser.finish()
        kept, bridge = bound.join(ids, [])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if message.get("role") != "assistant" or not isinstance(message.get("content"), str):
        return f"read as {message!r}, which is no assistant's message with text"
    if parser.message() != message:
        return f"read id by id it is {parser.message()!r}, at once {message!r}"
    if not max(0, len(ids) - bound.family.max_trim_tokens) <= kept <= len(ids):
        return f"join keeps {kept} of {len(ids)} ids, max_trim_tokens is {bound.family.max_trim_tokens}"
    return None if all(isinstance(token, int) for token in bridge) else f"join adds {bridge!r}, which are no ids"


def honours_kwargs(plugin: Plugin) -> str | Skip | None:
    """Fixed settings cannot be changed, aliases of one setting do the same, unknown settings do nothing."""
    made = False
    for bound in bound_revisions(plugin):
        made = True
        fault = _fixed_fault(bound) or _alias_fault(bound)
        if fault is None and _text(bound, {"no_such_setting": True}) != _text(bound, {}):
            fault = "a setting that it does not have changes what it writes"
        if fault is not None:
            return f"revision {bound.revision.name}: {fault}"
    return None if made else _NOT_BOUND


def _fixed_fault(bound: BoundFamily) -> str | None:
    for key, value in bound.fixed_kwargs.items():
        other = (not value) if isinstance(value, bool) else f"not {value}"
        try:
            bound.merge_kwargs({key: other})
        except RequestError:
            if bound.merge_kwargs({key: value}).get(key) == value:
                continue
        return f"fixes {key}={value!r}, and takes {key}={other!r}"
    return None


def _alias_fault(bound: BoundFamily) -> str | None:
    for group in bound.family.kwarg_aliases:
        names = [name for name in group if name not in bound.fixed_kwargs]
        for (first, second), value in product(permutations(names, 2), (True, False)):
            one, other = _text(bound, {first: value}), _text(bound, {second: value})
            if None in (one, other):  # the setting takes other values
                continue
            if one != other:
                return f"{first} and {second} are declared as one setting, and write different text"
            if _text(bound, {first: not value}, {second: value}) != other:
                return f"{second} does not replace {first}, though they are declared as one setting"
    return None


def _text(bound: BoundFamily, *layers: Mapping[str, Any]) -> str | None:
    """What a conversation is written as; None if the settings are refused."""
    try:
        return bound.render(_TALK, [LOOK_UP], bound.merge_kwargs(*layers))
    except (RequestError, RenderError):
        return None


def takes_long_histories(plugin: Plugin) -> str | Skip | None:
    """Joining looks at the end of a checkpoint alone, and reading a generation takes time in proportion to it."""
    made = False
    for bound in bound_revisions(plugin):
        made = True
        fault = _join_cost(bound) or _reading_cost(bound)
        if fault is not None:
            return f"revision {bound.revision.name}: {fault}"
    return None if made else _NOT_BOUND


class _Watched(Sequence[int]):
    """A long checkpoint that counts how many of its ids are looked at."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = ids
        self.seen = 0

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            found = list(self._ids[index])
            self.seen += len(found)
            return found
        self.seen += 1
        return self._ids[index]


def _join_cost(bound: BoundFamily) -> str | None:
    suffix = bound.encode(bound.render_suffix(_TALK[1], [_TALK[2]], None))
    turn = bound.encode(bound.render(_TALK[:2], add_generation_prompt=False))
    looked = []
    for repeats in (50, 5000):
        checkpoint = _Watched(turn * repeats)
        bound.join(checkpoint, suffix)
        looked.append(checkpoint.seen)
    if looked[1] > max(LOOKED_AT, looked[0] + LOOKED_AT):
        return f"join looks at {looked[1]} of {len(turn) * 5000} ids of a checkpoint; look at its end alone"
    return None


def _reading_cost(bound: BoundFamily) -> str | None:
    word = bound.encode("word ")
    short, long = (_seconds(bound, (word * length)[:length]) for length in (SHORT, LONG))
    if long > MOST_TIMES * short:
        return (
            f"reading {LONG} ids takes {long:.2f} s and {SHORT} ids {short:.2f} s: "
            "the time grows faster than the generation"
        )
    return None


def _seconds(bound: BoundFamily, ids: Sequence[int]) -> float:
    """Processor seconds of reading ids as they come; the least of three times."""
    taken = []
    for _ in range(3):
        start = time.process_time()
        parser = bound.parser(None)
        for token in ids:
            parser.feed([token])
        parser.finish()
        taken.append(time.process_time() - start)
    return min(taken)


CHECKS: Mapping[str, CheckFunction] = {
    "names what it writes": names_what_it_writes,
    "passes the self-check": passes_the_self_check,
    "reads any ids": reads_any_ids,
    "honours kwargs": honours_kwargs,
    "takes long histories": takes_long_histories,
}
