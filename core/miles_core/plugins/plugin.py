"""A loaded plugin, and the one wrapper that calls into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from miles_core.errors import MilesError, PluginContractError
from miles_core.plugins.importing import said
from miles_core.plugins.records import PluginRecord
from miles_core.plugins.wording import listed

_PLUGINS_FAULT = (Exception, SystemExit)
"""What is put down to the plugin; Ctrl-C and a cancelled task are not."""


class Plugin:
    """A loaded plugin: its record, the revision it was chosen with, and its hooks as plain callables.

    `target` is what the entry point or dotted path names (a module, class, object or function), `module`
    the module it was imported from.
    """

    def __init__(
        self,
        record: PluginRecord,
        hooks: Mapping[str, Callable[..., Any]],
        module: ModuleType,
        target: object,
        revision: str | None = None,
    ) -> None:
        self.record = record
        self.revision = revision
        self.module = module
        self.target = target
        self._hooks = hooks

    def at(self, revision: str) -> Plugin:
        """The same plugin, chosen with `@revision`."""
        return Plugin(self.record, self._hooks, self.module, self.target, revision)

    def has(self, hook: str) -> bool:
        """Whether the plugin implements `hook`."""
        return hook in self._hooks

    def hook(self, hook: str) -> Callable[..., Any]:
        """The hook as a plain callable that takes the spec's arguments.

        What it raises is not converted: use `guard` around the call, or `call`. A generate function stays
        in its form. Raises PluginContractError if the plugin lacks the hook.
        """
        if hook not in self._hooks:
            raise PluginContractError(f"{self.describe()} has no {hook}; it has {listed(self._hooks)}")
        return self._hooks[hook]

    def call(self, hook: str, *args: Any, **kwargs: Any) -> Any:
        """Call a synchronous hook; what it raises becomes a PluginContractError naming plugin and hook."""
        function = self.hook(hook)
        try:
            return function(*args, **kwargs)
        except MilesError:
            raise
        except _PLUGINS_FAULT as error:
            raise self._contract_error(hook, error) from error

    @contextmanager
    def guard(self, hook: str) -> Iterator[None]:
        """The same for code that `call` cannot run, such as an awaited hook or many calls in a row."""
        try:
            yield
        except MilesError:
            raise
        except _PLUGINS_FAULT as error:
            raise self._contract_error(hook, error) from error

    def _contract_error(self, hook: str, error: BaseException) -> PluginContractError:
        what = said(error, self.module.__name__)
        return PluginContractError(f"{self.describe()} failed in {hook}: {what}")

    def describe(self) -> str:
        """`family qwen3 of miles-plugins 0.1.0`, as messages say it."""
        return self.record.describe()

    def __repr__(self) -> str:
        return f"<Plugin {self.describe()}>"
