"""Imports of `miles.*`: modules made of the names in `names.MODULES`, each looked up when it is first used."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from miles_core.plugins.wording import meant
from miles_core.rollout.compat.names import MODULES

_PACKAGES = frozenset(name.rsplit(".", cut)[0] for name in MODULES for cut in range(1, name.count(".") + 1))


class Finder(MetaPathFinder, Loader):
    """Finds and makes the modules; another one below `miles` is an ImportError that lists them."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """A spec for what `--compat miles` provides, None for what is not below `miles`."""
        if name != "miles" and not name.startswith("miles."):
            return None
        if name in MODULES or name in _PACKAGES:
            return ModuleSpec(name, self, is_package=name in _PACKAGES)
        close = meant(name, MODULES)
        hint = f"did you mean {close}?" if close else f"it has {', '.join(sorted(MODULES))}"
        raise ModuleNotFoundError(f"miles is not installed, and --compat miles has no module {name}; {hint}", name=name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """The default one."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Give the module a way to look its names up."""
        values = MODULES.get(module.__name__, {})

        def lookup(name: str) -> Any:
            if name not in values:
                if name.startswith("__"):
                    raise AttributeError(name)
                has = ", ".join(values) or "only modules"
                raise AttributeError(f"--compat miles has no {module.__name__}.{name}; it has {has}")
            value = values[name]()
            vars(module)[name] = value
            return value

        vars(module).update(__getattr__=lookup, __all__=list(values), __doc__="Made by miles-plugins, --compat miles.")
