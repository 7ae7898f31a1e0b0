"""Who gets a bare name: exclusions from the environment first, then built-ins, then conflicts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from miles_core.plugins.kinds import KINDS
from miles_core.plugins.records import PluginRecord, Problem, State
from miles_core.plugins.selector import normalized
from miles_core.plugins.wording import listed, meant

DISABLE = "MILES_PLUGINS_DISABLE"
"""Comma list of `name`, `dist:name` or `dist:*` that may not load."""
ALLOW = "MILES_PLUGINS_ALLOW"
"""Comma list of `name`, `dist:name` or `dist:*`; if set, nothing else may load, built-ins included."""


def settle(records: Sequence[PluginRecord], environ: Mapping[str, str]) -> list[Problem]:
    """Mark what is disabled, shadowed or in conflict; return what the variables name in vain.

    A disabled plugin does not compete for its name. The result does not depend on the order of `records`.
    """
    problems = _exclude(records, environ)
    rivals: dict[tuple[str, str], list[PluginRecord]] = defaultdict(list)
    for record in records:
        record.bare = record.state is State.FOUND
        if record.bare:
            rivals[record.kind, record.name].append(record)
    for same in rivals.values():
        if len(same) > 1:
            _contest(same)
    return problems


def _contest(same: Sequence[PluginRecord]) -> None:
    flag = KINDS[same[0].kind].flag
    builtin = any(record.builtin for record in same)
    owners = sorted(record.distribution for record in same)
    for record in same:
        choose = f"choose it with {flag} {record.selector}"
        if builtin and not record.builtin:
            what = "is hidden by the built-in of that name"
            record.bare = False
            record.mark(State.SHADOWED, what, f"{choose}, or ask its author to rename it")
        elif not builtin:
            others = (owner for owner in owners if owner != record.distribution)
            what = f"has the same name as one in {listed(others, most=3)}"
            rest = "the other" if len(same) == 2 else "the others"
            record.mark(State.CONFLICT, what, f"{choose}, or leave {rest} out with {DISABLE}")


def _exclude(records: Sequence[PluginRecord], environ: Mapping[str, str]) -> list[Problem]:
    disable, allow = _entries(environ, DISABLE), _entries(environ, ALLOW)
    for record in records:
        names = _names(record)
        off = next((entry for entry in disable if entry in names), None)
        if off is not None:
            advice = f"take {off} out of {DISABLE} to use it"
            record.mark(State.DISABLED, f"is disabled by {DISABLE}={environ[DISABLE]}", advice)
        elif allow and not names.intersection(allow):
            what = f"is not among those allowed by {ALLOW}={environ[ALLOW]}"
            record.mark(State.DISABLED, what, f"add {record.name} to {ALLOW} to use it")
    known = set().union(*map(_names, records))
    return [*_in_vain(DISABLE, disable, known), *_in_vain(ALLOW, allow, known)]


def _names(record: PluginRecord) -> set[str]:
    return {record.name, record.selector, f"{record.distribution}:*"}


def _entries(environ: Mapping[str, str], variable: str) -> tuple[str, ...]:
    return tuple(_normal(entry) for entry in environ.get(variable, "").split(",") if entry.strip())


def _normal(entry: str) -> str:
    dist, colon, name = entry.strip().rpartition(":")
    return f"{normalized(dist.strip())}:{name.strip()}" if colon else name


def _in_vain(variable: str, entries: Iterable[str], known: set[str]) -> list[Problem]:
    """A misspelled exclusion would silently exclude nothing."""
    problems = []
    for entry in dict.fromkeys(entries):
        if entry not in known:
            close = meant(entry, known)
            advice = f"did you mean {close}?" if close else "miles-plugins list shows the names"
            problems.append(Problem(variable, f"names {entry}, which is not installed", advice, lost=False))
    return problems
