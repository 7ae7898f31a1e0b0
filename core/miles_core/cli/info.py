"""`miles-plugins info`: what a plugin is, where it comes from, its hooks, docs and options."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from typing import Any

import click

from miles_core.cli.apart import leave
from miles_core.cli.completion import plugin_names
from miles_core.cli.output import claim_stdout, table, write, write_json
from miles_core.cli.results import chosen, record_result
from miles_core.errors import PluginError
from miles_core.plugins import KINDS, Plugin, PluginRecord, Registry, State, about


@click.command("info")
@click.argument("words", nargs=-1, required=True, metavar="[KIND] NAME", shell_complete=plugin_names)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def command(words: tuple[str, ...], as_json: bool) -> None:
    """Show what a plugin is, where it comes from, its hooks, docs and options.

    KIND is one of family, agent, generator, matcher, engine and sample-hook; without it, every plugin of that
    name is shown. NAME may be distribution:name, or with KIND a dotted path. Exit code 1 if one cannot be
    loaded.
    """
    kind, name = _kind_and_name(words)
    stdout = claim_stdout()
    registry = Registry.discover()
    results = [_describe(registry, record) for record in chosen(registry, name, kind)]
    if as_json:
        write_json({"plugins": results}, stdout)
    else:
        write("\n\n".join(map(_text, results)), stdout)
    leave(1 if any(result["state"] == "failed" for result in results) else 0)


def _kind_and_name(words: Sequence[str]) -> tuple[str | None, str]:
    if len(words) == 1:
        return None, words[0]
    if len(words) > 2 or words[0] not in KINDS:
        raise click.UsageError(f"expected [KIND] NAME, where KIND is one of {', '.join(KINDS)}")
    return words[0], words[1]


def _describe(registry: Registry, record: PluginRecord) -> dict[str, Any]:
    """The record, and what only loading tells; a plugin that cannot be loaded is described all the same."""
    contested = record.state in (State.SHADOWED, State.CONFLICT)
    flag = f"{KINDS[record.kind].flag} {record.selector if contested else record.name}"
    own = about(record)
    extra: dict[str, Any] = {"flag": flag, "file": None, "hooks": [], "docs": None, "options": []}
    extra.update(summary=own.summary or None, links=list(own.links))
    try:
        plugin = registry.load_record(record)
        extra.update(file=getattr(plugin.module, "__file__", None), hooks=list(record.hooks), docs=_docs(plugin))
        extra["options"] = _options(plugin)
    except PluginError as error:
        what, _, advice = error.message.partition("\n  ")
        return {**record_result(record), "state": "failed", "error": what, "advice": advice or None, **extra}
    return {**record_result(record), **extra}


def _docs(plugin: Plugin) -> str | None:
    """The docstring of what the entry point names, else of its module, else of the main hook."""
    main = KINDS[plugin.record.kind].main_hook
    sources: list[object] = [plugin.target, plugin.module]
    if main is not None and plugin.has(main):
        sources.append(plugin.hook(main))
    for source in sources:
        text = vars(source).get("__doc__") if hasattr(source, "__dict__") else None
        if type(text) is str and text.strip():
            return inspect.cleandoc(text)
    return None


def _options(plugin: Plugin) -> list[dict[str, str | None]]:
    """What can be chosen about it: a family's revisions, the flags of a generate function."""
    if plugin.has("tito_family"):
        family = plugin.call("tito_family")
        with plugin.guard("tito_family"):
            return [_revision(plugin, revision, family.checkpoints) for revision in family.revisions]
    if plugin.has("add_arguments"):
        parser = argparse.ArgumentParser(add_help=False)
        plugin.call("add_arguments", parser)
        return [_flag(action) for action in parser._actions]
    return []


def _revision(plugin: Plugin, revision: Any, checkpoints: Sequence[str]) -> dict[str, str | None]:
    name = f"{plugin.record.name}@{revision.name}"
    return {"name": name, "help": ", ".join(revision.checkpoints or checkpoints) or None}


def _flag(action: argparse.Action) -> dict[str, str | None]:
    text = action.help or ""
    if action.default not in (None, argparse.SUPPRESS):
        text = f"{text} (default: {action.default})".strip()
    return {"name": ", ".join(action.option_strings) or action.dest, "help": text or None}


def _text(result: dict[str, Any]) -> str:
    origin = f"{result['distribution']} {result['version'] or ''}".rstrip() if result["distribution"] else None
    facts = [
        ("from", origin),
        ("about", result["summary"]),
        ("links", "; ".join(result["links"])),
        ("target", result["target"]),
        ("file", result["file"]),
        ("state", result["state"]),
        ("choose", result["flag"]),
        ("extras", ", ".join(result["extras"])),
        ("hooks", ", ".join(result["hooks"])),
    ]
    parts = [table((result["kind"], result["name"]), [(key, value) for key, value in facts if value])]
    if result["error"]:
        parts.append(f"{result['error']}\n  {result['advice']}")
    if result["options"]:
        rows = [(option["name"] or "", option["help"] or "") for option in result["options"]]
        parts.append("options\n" + "\n".join(f"  {line}" for line in table(*_split(rows)).splitlines()))
    if result["docs"]:
        parts.append(result["docs"])
    return "\n\n".join(parts)


def _split(rows: Sequence[Sequence[str]]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """The first row as headers: options have none."""
    return rows[0], rows[1:]
