"""What shells complete beyond commands and flags: names of plugins, from metadata alone."""

from __future__ import annotations

import click

from miles_core.plugins import Registry, State


def plugin_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Names that begin so, of the kind on the command line if any; `dist:name` where a bare name does not choose."""
    kind, given = ctx.params.get("kind"), ctx.params.get(parameter.name or "") or ()
    records = [record for record in Registry.discover().records if kind in (None, record.kind)]
    names = [r.selector if r.state in (State.SHADOWED, State.CONFLICT) else r.name for r in records]
    return sorted({name for name in names if name.startswith(incomplete) and name not in given})
