"""`miles-plugins check`: load plugins, check their signatures, and run what conformance there is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click

from miles_core.cli.output import claim_stdout, write, write_json
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
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--kind", type=click.Choice(list(KINDS)), help="Only plugins of this kind.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
@click.pass_context
def command(ctx: click.Context, names: tuple[str, ...], kind: str | None, as_json: bool) -> None:
    """Load plugins and check that they keep their contracts.

    NAME is a plugin's name, distribution:name, or with --kind a dotted path; without one, every plugin that
    is not disabled is checked. Exit code 1 if any fails.
    """
    stdout = claim_stdout()
    registry = Registry.discover()
    results = [_check(registry, record) for record in _records(registry, names, kind)]
    problems = () if names else registry.problems
    if as_json:
        write_json(_result(results, problems), stdout)
    else:
        write("\n\n".join(_paragraphs(results, problems, reasons=bool(names))), stdout)
    lost = any(problem.lost for problem in problems)
    ctx.exit(1 if lost or any(result.failed for result in results) else 0)


def _records(registry: Registry, names: tuple[str, ...], kind: str | None) -> list[PluginRecord]:
    if names:
        return [record for name in names for record in chosen(registry, name, kind)]
    return [r for r in registry.records if r.state is not State.DISABLED and kind in (None, r.kind)]


def _check(registry: Registry, record: PluginRecord) -> Checked:
    try:
        plugin = registry.load_record(record)
    except PluginLoadError as error:
        return Checked(record, error.message)
    return Checked(record, None, conformance.run(plugin).checks)


def _result(results: list[Checked], problems: tuple[Problem, ...]) -> dict[str, Any]:
    plugins = [
        {
            **record_result(result.record),
            "ok": not result.failed,
            "hooks": list(result.record.hooks),
            "checks": [{"name": c.name, "outcome": c.outcome.value, "reason": c.reason} for c in result.checks],
        }
        for result in results
    ]
    return {"plugins": plugins, "problems": [problem_result(problem) for problem in problems]}


def _paragraphs(results: list[Checked], problems: tuple[Problem, ...], *, reasons: bool) -> list[str]:
    """A line per plugin with its failures, then problems and the count; `reasons` for skipped checks too."""
    lines = [line for result in results for line in _lines(result, reasons=reasons)]
    failed = sum(result.failed for result in results)
    noun = "plugin" if len(results) == 1 else "plugins"
    summary = f"{len(results)} {noun} checked, {failed or 'none'} failed"
    return [*(["\n".join(lines)] if lines else []), *attention((), problems), summary]


def _lines(result: Checked, *, reasons: bool) -> list[str]:
    if result.load_error is not None:
        what, *advice = result.load_error.splitlines()
        return [f"FAIL  {what}", *(f"        {line.strip()}" for line in advice)]
    passed = sum(check.outcome is Outcome.PASS for check in result.checks)
    skipped = [check for check in result.checks if check.outcome is Outcome.SKIP]
    counts = f"{passed} passed" + (f", {len(skipped)} skipped" if skipped else "")
    told = [check for check in result.checks if check.outcome is Outcome.FAIL]
    told += skipped if reasons else []
    head = f"{'FAIL' if result.failed else 'ok  '}  {result.record.describe()}: {counts}"
    return [head, *(f"        {check.outcome.value} {check.name}: {check.reason}" for check in told)]
