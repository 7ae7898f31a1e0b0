"""`miles-plugins check`: load plugins, check their signatures, and run what conformance there is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click

from miles_core.cli.apart import Died, apart
from miles_core.cli.completion import plugin_names
from miles_core.cli.output import claim_stdout, wrapped, write, write_json
from miles_core.cli.results import attention, chosen, problem_result, record_result
from miles_core.errors import PluginLoadError
from miles_core.plugins import KINDS, PluginRecord, Problem, Registry, State
from miles_core.testing import conformance
from miles_core.testing.conformance import Check, Outcome


@dataclass(frozen=True)
class Checked:
    """One plugin: why it did not load, or how its checks ended."""

    record: PluginRecord
    load_error: str | None
    checks: tuple[Check, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether the plugin did not load, or a check failed."""
        return self.load_error is not None or any(check.outcome is Outcome.FAIL for check in self.checks)


@click.command("check")
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=plugin_names)
@click.option("--kind", type=click.Choice(list(KINDS)), help="Only plugins of this kind.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
@click.pass_context
def command(ctx: click.Context, names: tuple[str, ...], kind: str | None, as_json: bool) -> None:
    """Load plugins and check that they keep their contracts.

    NAME is a plugin's name, distribution:name, or with --kind a dotted path; a plugin that is named is tried out too,
    against fakes, and all its checks are shown. Without one, every plugin that is not disabled is checked. Exit code 1
    if any fails.
    """
    stdout = claim_stdout()
    registry = Registry.discover()
    results = list(_checked(registry, _records(registry, names, kind), try_out=bool(names)))
    problems = () if names else registry.problems
    if as_json:
        write_json(_result(results, problems), stdout)
    else:
        write(wrapped("\n\n".join(_paragraphs(results, problems, whole=bool(names))), stdout), stdout)
    lost = any(problem.lost for problem in problems)
    ctx.exit(1 if lost or any(result.failed for result in results) else 0)


def _records(registry: Registry, names: tuple[str, ...], kind: str | None) -> list[PluginRecord]:
    if names:
        return [record for name in names for record in chosen(registry, name, kind)]
    return [r for r in registry.records if r.state is not State.DISABLED and kind in (None, r.kind)]


def _checked(registry: Registry, records: list[PluginRecord], *, try_out: bool) -> Iterator[Checked]:
    """Each plugin's checks, each distribution in a process of its own where the system can fork one."""

    def check(record: PluginRecord) -> Checked:
        try:
            plugin = registry.load_record(record)
        except PluginLoadError as error:
            return Checked(record, error.message)
        return Checked(record, None, conformance.run(plugin, try_out=try_out).checks)

    if not hasattr(os, "fork"):
        yield from map(check, records)
        return
    found: dict[int, Checked] = {}
    for distribution in dict.fromkeys(record.distribution for record in records):
        own = [record for record in records if record.distribution == distribution]
        for record, result in zip(own, apart(own, check, PluginRecord.describe), strict=True):
            found[id(record)] = _dead(record, result) if isinstance(result, Died) else result
    yield from (found[id(record)] for record in records)


def _dead(record: PluginRecord, death: Died) -> Checked:
    record.mark(State.FAILED, death.how, "a plugin must leave the program that uses it alone; tell its author")
    return Checked(record, f"{record.error}\n  {record.advice}")


def _result(results: list[Checked], problems: tuple[Problem, ...]) -> dict[str, Any]:
    plugins = [
        {
            **record_result(result.record),
            "ok": not result.failed,
            "hooks": list(result.record.hooks),
            "checks": [_check_result(check) for check in result.checks],
        }
        for result in results
    ]
    return {"plugins": plugins, "problems": [problem_result(problem) for problem in problems]}


def _check_result(check: Check) -> dict[str, Any]:
    return {
        "name": check.name,
        "outcome": check.outcome.value,
        "required": check.required,
        "reason": check.reason,
    }


def _paragraphs(results: list[Checked], problems: tuple[Problem, ...], *, whole: bool) -> list[str]:
    """A line per plugin with its failures, then problems and the count; with `whole`, a line for each check."""
    lines = [line for result in results for line in _lines(result, whole=whole)]
    failed = sum(result.failed for result in results)
    noun = "plugin" if len(results) == 1 else "plugins"
    summary = f"{len(results)} {noun} checked, {failed or 'none'} failed"
    return [*(["\n".join(lines)] if lines else []), *attention((), problems), summary]


def _lines(result: Checked, *, whole: bool) -> list[str]:
    if result.load_error is not None:
        what, *advice = result.load_error.splitlines()
        return [f"FAIL  {what}", *(f"        {line.strip()}" for line in advice)]
    passed = sum(check.outcome is Outcome.PASS for check in result.checks)
    skipped = sum(check.outcome is Outcome.SKIP for check in result.checks)
    counts = f"{passed} passed" + (f", {skipped} skipped" if skipped else "")
    told = [check for check in result.checks if whole or check.outcome is Outcome.FAIL]
    head = f"{'FAIL' if result.failed else 'ok  '}  {result.record.describe()}: {counts}"
    return [head, *(f"        {check.line()}" for check in told)]
