"""What commands say about records and problems, in both views; and which records a name means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miles_core.errors import ConfigError, PluginNotFound
from miles_core.plugins import KINDS, PluginRecord, Problem, Registry, Selector, State
from miles_core.plugins.wording import meant

_NEEDS_ATTENTION = (State.FAILED, State.SHADOWED, State.CONFLICT)


def record_result(record: PluginRecord) -> dict[str, Any]:
    """A record as JSON keys and values; what is not known is null."""
    return {
        "kind": record.kind,
        "name": record.name,
        "state": record.state.value,
        "version": record.version or None,
        "distribution": record.distribution or None,
        "builtin": record.builtin,
        "selector": record.selector,
        "target": record.target,
        "extras": list(record.extras),
        "location": record.location or None,
        "error": record.error,
        "advice": record.advice,
    }


def problem_result(problem: Problem) -> dict[str, Any]:
    """A problem as JSON keys and values."""
    return {"where": problem.where, "what": problem.what, "advice": problem.advice, "lost": problem.lost}


def attention(records: Sequence[PluginRecord], problems: Sequence[Problem]) -> list[str]:
    """A paragraph on what needs attention, with what to do; nothing if nothing does."""
    items = [(r.error, r.advice) for r in records if r.state in _NEEDS_ATTENTION]
    noun = "thing" if problems else "plugin"
    items += [(f"{problem.where} {problem.what}", problem.advice) for problem in problems]
    if not items:
        return []
    head = f"1 {noun} needs attention:" if len(items) == 1 else f"{len(items)} {noun}s need attention:"
    return ["\n".join([head, *(f"  {what}\n    {advice}" for what, advice in items)])]


def chosen(registry: Registry, name: str, kind: str | None) -> list[PluginRecord]:
    """The records that `name` means: one per kind that has it, or of `kind` alone.

    Raises what `Registry.find` raises, and ConfigError for a dotted path without a kind.
    """
    if kind is not None:
        return [registry.find(kind, name)]
    selector = Selector.parse(name)
    if selector.dotted:
        raise ConfigError(f"a dotted path is a plugin of any kind\n  say which: --kind agent {name}")
    kinds = [
        kind
        for kind in KINDS
        if any(
            record.kind == kind and record.name == selector.name and selector.dist in (None, record.distribution)
            for record in registry.records
        )
    ]
    if not kinds:
        raise PluginNotFound(_absent(registry, selector))
    return [registry.find(kind, name) for kind in kinds]


def _absent(registry: Registry, selector: Selector) -> str:
    known = {record.name for record in registry.records} | {record.selector for record in registry.records}
    text = selector.name if selector.dist is None else f"{selector.dist}:{selector.name}"
    close = meant(text, known)
    what = f"no plugin is named {text}" + (f"; did you mean {close}?" if close else "")
    return f"{what}\n  miles-plugins list shows the names"
