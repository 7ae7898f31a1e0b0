"""Load a record's plugin and register it with pluggy.

What pluggy gets is a bag of functions with the specs' arguments, not the plugin's own object: one module may
stand behind several plugins, and forms that differ from the spec are adapted first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import pluggy

from miles_core import hookspecs
from miles_core.errors import PluginLoadError
from miles_core.plugins.hooks import collect
from miles_core.plugins.importing import import_target, said
from miles_core.plugins.kinds import KINDS, Kind
from miles_core.plugins.plugin import Plugin
from miles_core.plugins.records import PluginRecord


class Manager:
    """Every loaded plugin, registered with pluggy under its kind and selector."""

    def __init__(self) -> None:
        self._pluggy = _Pluggy(hookspecs.PROJECT)
        self._pluggy.add_hookspecs(hookspecs)

    def load(self, record: PluginRecord, hook: str | None) -> Plugin:
        """Import, check and register; the text of the PluginLoadError goes on a sentence about the plugin."""
        plugin = _looked_into(record, hook)
        record.hooks = tuple(name for name in KINDS[record.kind].hooks if plugin.has(name))
        try:
            self._pluggy.register(_Bag(plugin), f"{record.kind} {record.selector} {hook or ''}".rstrip())
        except (pluggy.PluginValidationError, ValueError) as error:
            raise PluginLoadError(f"cannot be registered: {said(error)}\n  tell its author") from error
        return plugin

    def call(self, hook: str, arguments: Mapping[str, object]) -> list[Any]:
        """Call `hook` on every registered plugin that has it."""
        results: list[Any] = getattr(self._pluggy.hook, hook)(**arguments)
        return results


def _looked_into(record: PluginRecord, hook: str | None) -> Plugin:
    """The plugin, imported and checked; an object that raises at being looked at is broken like any other."""
    kind = KINDS[record.kind]
    try:
        module, target = import_target(record)
        _check_version(kind, module)
        return Plugin(record, collect(kind, module, target, hook), module, target)
    except (PluginLoadError, KeyboardInterrupt):
        raise
    except BaseException as error:
        module_name = record.target.partition(":")[0]
        raise PluginLoadError(f"cannot be looked into: {said(error, module_name)}\n  tell its author") from error


class _Bag:
    """The hooks of one plugin as attributes, which is what pluggy reads."""

    def __init__(self, plugin: Plugin) -> None:
        for hook in plugin.record.hooks:
            setattr(self, hook, _with_spec_arguments(plugin, hook))


class _Pluggy(pluggy.PluginManager):
    """Takes everything in a bag for a hook, marked or not."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        return {} if name in vars(plugin) else None


def _with_spec_arguments(plugin: Plugin, hook: str) -> Callable[..., Any]:
    # pluggy reads the argument names of the function that is wrapped: the spec's
    @functools.wraps(getattr(hookspecs, hook))
    def call(*args: object) -> Any:
        return plugin.call(hook, *args)

    return call


def _check_version(kind: Kind, module: ModuleType) -> None:
    """Raise PluginLoadError unless the range that the module states has our version of the contract."""
    ours = hookspecs.CONTRACT_VERSIONS[kind.name]
    match vars(module).get("MILES_CONTRACT", (ours, ours)):
        case (int(low), int(high)) if low <= ours <= high:
            return
        case (int(low), int(high)) if low <= high:
            span = f"version {low}" if low == high else f"versions {low} to {high}"
            what = f"supports {span} of the {kind.name} contract, and this is version {ours}"
            raise PluginLoadError(f"{what}\n  upgrade {'miles-plugins' if low > ours else 'the plugin'}")
        case stated:
            what = f"has MILES_CONTRACT = {stated!r}, which is no range"
            raise PluginLoadError(f"{what}\n  write the lowest and highest version: MILES_CONTRACT = (1, 1)")
