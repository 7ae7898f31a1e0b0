"""Checks of model families, on a small tokenizer that has the family's own control tokens.

They show that turns join: what a session has after a turn is what the template gives for the whole
conversation. `miles-plugins verify` shows the same for a real checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from miles_core.errors import ConfigError
from miles_core.plugins import Plugin
from miles_core.testing.conformance.report import CheckFunction, Skip
from miles_core.testing.fake_tokenizer import CHATML, tokenizer_for
from miles_core.testing.verify import CHECKS as VERIFIED
from miles_core.testing.verify import LOOK_UP, Finding, Verification, verify
from miles_core.tito import BoundFamily, TitoFamily
from miles_core.types import Message

APPEND_ONLY, JOINED, _, PARSED = VERIFIED

_ASKED: Message = {"role": "user", "content": "What is 1 + 2, naïvely? 数 🙂"}


def declares_a_family(plugin: Plugin) -> str | None:
    """`tito_family()` returns a TitoFamily, and the same one every time."""
    family = plugin.call("tito_family")
    if not isinstance(family, TitoFamily):
        return f"tito_family returned {type(family).__name__}; return a TitoFamily"
    if not family.revisions:
        return "the family has no revisions; declare at least one"
    if not family.best_effort and not family.stop_tokens:
        return "stop_tokens is empty: without the token that ends a turn, no generation can be told to be whole"
    if family.name != plugin.record.name and "." not in plugin.record.name:
        return f"the family calls itself {family.name!r}, and its entry point {plugin.record.name!r}; use one name"
    return None if plugin.call("tito_family") == family else "tito_family returns another family each time"


def binds(plugin: Plugin) -> Skip | None:
    """Every revision binds to a tokenizer that has the family's tokens."""
    family: TitoFamily = plugin.call("tito_family")
    bound = {one.revision.name for one in bound_revisions(plugin)}
    left = [revision.name for revision in family.revisions if revision.name not in bound]
    if not left:
        return None
    return Skip(f"{', '.join(left)} needs a real checkpoint's tokenizer; see miles-plugins verify")


def renders(plugin: Plugin) -> str | Skip | None:
    """The text of the messages is in what is rendered."""
    made = 0
    for bound in bound_revisions(plugin):
        made += 1
        text = bound.render([_ASKED], [LOOK_UP])
        if _ASKED["content"] not in text:
            return f"revision {bound.revision.name} leaves out the user's text: {text!r}"
    return None if made else Skip("no revision could be bound")


def appends(plugin: Plugin) -> str | Skip | None:
    """What comes after a turn leaves the text before it as it was, on every trajectory of `verify`."""
    return _first_fault(plugin, (APPEND_ONLY,))


def joins(plugin: Plugin) -> str | Skip | None:
    """A turn's tokens with the suffix's equal the whole conversation's, on every trajectory of `verify`."""
    # not the self-check: it goes by which tokens are special, which a real checkpoint's tokenizer says
    return _first_fault(plugin, (JOINED,))


def parses(plugin: Plugin) -> str | Skip | None:
    """Parsing what was sampled gives the message that was rendered."""
    bound = [one for one, _ in _verified(plugin)]
    if bound and not any(one.reads for one in bound):
        return Skip("the family declares no parse_facts: its generations are read as plain text")
    return _first_fault(plugin, (PARSED,))


def _first_fault(plugin: Plugin, checks: Sequence[str]) -> str | Skip | None:
    verified = _verified(plugin)
    if not verified:
        return Skip("no revision could be bound")
    for bound, verification in verified:
        for tried in verification.tried:
            for name, found in tried.failures:
                if name in checks:
                    return f"revision {bound.revision.name}, {tried.trajectory}: {_told(found)}"
    return None


def _told(found: Finding) -> str:
    place = "" if found.turn is None else f"turn {found.turn}: "
    difference = found.difference
    if difference is None:
        return f"{place}{found.reason}"
    return (
        f"{place}{found.reason}: token {difference.index} differs: "
        f"expected {difference.expected!r}, found {difference.actual!r}"
    )


@lru_cache(maxsize=2)
def _verified(plugin: Plugin) -> list[tuple[BoundFamily, Verification]]:
    """Every revision that binds here, on every trajectory; several checks read it."""
    return [(bound, verify(bound, thinking="on")) for bound in bound_revisions(plugin)]


def bound_revisions(plugin: Plugin) -> Iterator[BoundFamily]:
    """Each revision, bound to a small tokenizer; none where that takes a real checkpoint's tokens."""
    family: TitoFamily = plugin.call("tito_family")
    for revision in family.revisions:
        template = CHATML if revision.template is None and revision.encoder is None else None
        try:
            yield family.bind(tokenizer_for(family), revision.name, template=template)
        except ConfigError:
            continue


CHECKS: Mapping[str, CheckFunction] = {
    "declares a family": declares_a_family,
    "binds": binds,
    "renders": renders,
    "only appends": appends,
    "joins turns": joins,
    "parses what it renders": parses,
}
