"""Modules in place of libraries that have no build for the CPU: what SGLang imports is there, and computes nothing.

Submodules are there too. A name in capitals is an empty class. Another name may decorate a function, which then is
what it was, and be passed on; called with nothing, or where `decorates` is false, it raises NotImplementedError.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any


class Name:
    """A name that is there to be imported."""

    def __init__(self, path: str, decorates: bool) -> None:
        self._path = path
        self._decorates = decorates

    def __getattr__(self, name: str) -> Any:
        return attribute(self._path, name, self._decorates)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._decorates or not (args or kwargs):
            raise NotImplementedError(f"{self._path} has no build for the CPU")
        return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else self

    def __repr__(self) -> str:
        return f"<stand-in {self._path}>"


class ClassOfNames(type):
    """What empty classes are made of: their attributes are names too, the same each time."""

    def __getattr__(cls, name: str) -> Any:
        made = attribute(f"{cls.__module__}.{cls.__name__}", name, decorates=True)
        setattr(cls, name, made)
        return made

    def __getitem__(cls, parameters: Any) -> ClassOfNames:
        return cls


def attribute(path: str, name: str, decorates: bool) -> Any:
    """What stands for `path.name`."""
    if name.startswith("__"):
        raise AttributeError(f"{path} has no {name}")
    if name[0].isupper():
        return ClassOfNames(name, (), {"__module__": path, "__init__": lambda self, *args, **kwargs: None})
    return Name(f"{path}.{name}", decorates)


def attributes(path: str, decorates: bool = True) -> Callable[[str], Any]:
    """A module's `__getattr__`; the same class or name each time."""
    known: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in known:
            known[name] = attribute(path, name, decorates)
        return known[name]

    return get


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module below a package."""

    def __init__(self, package: str) -> None:
        self._below = f"{package}."

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(self._below):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["__getattr__"] = attributes(module.__name__)


def with_submodules(package: str) -> None:
    """Let everything below `package` be importable, behind what is really there."""
    sys.meta_path.append(_Submodules(package))
