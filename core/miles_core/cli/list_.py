"""`miles-plugins list`: what is installed, from metadata alone; imports no plugin and never fails for one."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from miles_core.cli.output import table, wrapped, write, write_json
from miles_core.cli.results import attention, problem_result, record_result
from miles_core.plugins import KINDS, PluginRecord, Registry


@click.command("list")
@click.option("--kind", type=click.Choice(list(KINDS)), help="Only plugins of this kind.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def command(kind: str | None, as_json: bool) -> None:
    """List installed plugins and what needs attention.

    Reads metadata only: no plugin is imported, so a plugin that cannot be imported is listed as found. See
    `miles-plugins check` for that.
    """
    registry = Registry.discover()
    records = [record for record in registry.records if kind in (None, record.kind)]
    if as_json:
        problems = [problem_result(problem) for problem in registry.problems]
        write_json({"plugins": [record_result(record) for record in records], "problems": problems})
        return
    parts = [_table(records)] if records else [f"No {kind or 'plugin'} is installed."]
    parts += attention(records, registry.problems)
    write(wrapped("\n\n".join(parts), sys.stdout))


def _table(records: Sequence[PluginRecord]) -> str:
    rows = [(r.kind, r.name, r.state.value, r.version or "-", _origin(r)) for r in records]
    return table(("KIND", "NAME", "STATE", "VERSION", "FROM"), rows, least=(max(map(len, KINDS)),))


def _origin(record: PluginRecord) -> str:
    """The distribution, with the extras that the plugin needs, as pip spells it."""
    extras = f"[{','.join(record.extras)}]" if record.extras else ""
    return f"{record.distribution}{extras}"
