"""The registry: find a plugin by its selector, load it, and call hooks that go to all."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

from miles_core.errors import ConfigError, PluginAmbiguous, PluginDisabled, PluginLoadError, PluginNotFound
from miles_core.plugins import policy
from miles_core.plugins.discovery import installed
from miles_core.plugins.kinds import KINDS, Kind
from miles_core.plugins.plugin import Plugin
from miles_core.plugins.records import PluginRecord, Problem, State
from miles_core.plugins.selector import Selector
from miles_core.plugins.wording import listed, meant

if TYPE_CHECKING:
    from miles_core.plugins.manager import Manager


class Registry:
    """Every installed plugin, and those that were loaded.

    `records` are sorted by kind, name and distribution; `problems` are metadata that could not be read and
    exclusions that name nothing.
    """

    def __init__(self, records: Sequence[PluginRecord], problems: Sequence[Problem] = ()) -> None:
        self.records = tuple(sorted(records, key=_place))
        self.problems = tuple(sorted(problems, key=lambda problem: (problem.where, problem.what)))
        self._plugins: dict[tuple[str, str, str | None], Plugin] = {}
        self._dotted: dict[tuple[str, str], PluginRecord] = {}

    @classmethod
    def discover(cls, *, path: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> Registry:
        """Read the metadata on `path` (`sys.path`); imports no plugin, and no plugin can make it fail."""
        records, problems = installed(sys.path if path is None else path)
        return cls(records, [*problems, *policy.settle(records, environ)])

    @property
    def loaded(self) -> tuple[Plugin, ...]:
        """The plugins loaded so far, in the order of loading."""
        return tuple(self._plugins.values())

    def find(self, kind: str, selector: str) -> PluginRecord:
        """The record that `selector` chooses; a dotted path gets a record of its own.

        MILES_PLUGINS_ALLOW does not concern dotted paths. Raises PluginNotFound, PluginAmbiguous,
        PluginDisabled, or ConfigError if the selector is malformed.
        """
        return self._find(_kind(kind), Selector.parse(selector))

    def load(self, kind: str, selector: str, *, hook: str | None = None) -> Plugin:
        """Import, check and register the plugin that `selector` chooses; loading it again costs nothing.

        `hook` says which hook a plain function stands for, where that is not the kind's main hook. Raises
        what `find` raises, and PluginLoadError naming the plugin, its distribution and what to do.
        """
        parsed = Selector.parse(selector)
        plugin = self.load_record(self._find(_kind(kind), parsed), hook=hook)
        return plugin if parsed.revision is None else plugin.at(parsed.revision)

    def load_record(self, record: PluginRecord, *, hook: str | None = None) -> Plugin:
        """Load the plugin of one of `records`, whatever its bare name means.

        Raises PluginDisabled or PluginLoadError.
        """
        key = (record.kind, record.selector, hook)
        if key not in self._plugins:
            if record.state is State.DISABLED:
                raise PluginDisabled(f"{record.error}\n  {record.advice}")
            if record.state is State.FAILED:
                raise PluginLoadError(f"{record.error}\n  {record.advice}")
            self._plugins[key] = self._load(record, hook)
        return self._plugins[key]

    def call_all(self, hook: str, **kwargs: object) -> list[Any]:
        """Call `hook` on every loaded plugin that has it, for hooks that go to all.

        The last loaded comes first. Raises PluginContractError naming the plugin that failed.
        """
        return self._manager.call(hook, kwargs)

    @cached_property
    def _manager(self) -> Manager:
        from miles_core.plugins.manager import Manager  # here, since `list` does without pluggy

        return Manager()

    def _load(self, record: PluginRecord, hook: str | None) -> Plugin:
        try:
            plugin = self._manager.load(record, hook)
        except PluginLoadError as error:
            what, _, advice = error.message.partition("\n  ")
            record.mark(State.FAILED, what, advice)
            raise PluginLoadError(f"{record.error}\n  {record.advice}") from error.__cause__
        record.state, record.error, record.advice = State.LOADED, None, None
        return plugin

    def _find(self, kind: Kind, selector: Selector) -> PluginRecord:
        if selector.revision is not None and kind.name != "family":
            raise ConfigError(
                f"{selector.raw!r} has a revision, and only families have any\n"
                f"  write {kind.flag} {selector.raw.partition('@')[0]}"
            )
        if selector.dotted:
            record = PluginRecord(kind.name, selector.name, "", "", selector.name)
            return self._dotted.setdefault((kind.name, selector.name), record)
        same = [r for r in self.records if r.kind == kind.name and r.name == selector.name]
        chosen = [r for r in same if selector.dist in (None, r.distribution)]
        if not chosen:
            raise PluginNotFound(self._absent(kind, selector, same))
        return _one(kind, selector, chosen)

    def _absent(self, kind: Kind, selector: Selector, same: Sequence[PluginRecord]) -> str:
        """Whatever was probably meant: another distribution, a dotted path, another spelling or kind."""
        what = f"no {kind.name} is named {selector.raw.strip()}"
        if same:
            return f"{what}\n  there is {listed(record.selector for record in same)}"
        if "." in selector.raw.partition(":")[0]:
            return f"{what}\n  for a dotted path write {selector.raw.strip().replace(':', '.')}"
        known = dict.fromkeys(record.name for record in self.records if record.kind == kind.name)
        others = [KINDS[record.kind] for record in self.records if record.name == selector.name]
        close = meant(selector.name, known)
        if close:
            what += f"; did you mean {close}?"
        elif others:
            what += f"; the {others[0].name} of that name is chosen with {others[0].flag}"
        return f"{what}\n  installed: {', '.join(known) or 'none'}{_of_module(kind, selector.name)}"


def _place(record: PluginRecord) -> tuple[int, str, bool, str]:
    return list(KINDS).index(record.kind), record.name, not record.builtin, record.distribution


def _of_module(kind: Kind, name: str) -> str:
    """How the function of a module is named, where there is a module of that name; it is not imported."""
    spec = None if name in sys.stdlib_module_names else PathFinder.find_spec(name)
    if kind.main_hook is None or spec is None or not spec.has_location:
        return ""
    return f"\n  for the module of that name write {name}.{kind.main_hook}"


def _kind(name: str) -> Kind:
    if name not in KINDS:
        close = meant(name, KINDS)
        advice = f"did you mean {close}?" if close else f"the kinds are {listed(KINDS)}"
        raise ConfigError(f"there is no kind of plugin {name!r}\n  {advice}")
    return KINDS[name]


def _one(kind: Kind, selector: Selector, chosen: Sequence[PluginRecord]) -> PluginRecord:
    """The one record that a bare name or `dist:name` means."""
    enabled = [record for record in chosen if record.state is not State.DISABLED]
    if not enabled:
        raise PluginDisabled(f"{chosen[0].error}\n  {chosen[0].advice}")
    if selector.dist is None:
        enabled = [record for record in enabled if record.bare] or enabled
        if len(enabled) > 1:
            owners = listed(f"{record.distribution} {record.version}" for record in enabled)
            forms = listed((f"{kind.flag} {record.selector}" for record in enabled), "or")
            raise PluginAmbiguous(f"{kind.name} {selector.name} is in {owners}\n  choose with {forms}")
    return enabled[0]
