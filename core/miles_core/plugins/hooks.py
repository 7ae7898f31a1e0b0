"""Find the hooks of an imported object: which of its functions they are.

Forms that differ from the spec are adapted by `signatures`. Errors are PluginLoadErrors whose text goes on a
sentence that the registry starts with the plugin's name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from miles_core import hookspecs
from miles_core.errors import PluginLoadError
from miles_core.plugins.importing import said
from miles_core.plugins.kinds import KINDS, MAY_LACK_MAIN_HOOK, Kind
from miles_core.plugins.signatures import adapted
from miles_core.plugins.wording import a, listed, meant

AnyCallable = Callable[..., Any]

_MARK = f"{hookspecs.PROJECT}_impl"
_EVERY_HOOK = frozenset(hook for kind in KINDS.values() for hook in kind.hooks)


def collect(kind: Kind, module: ModuleType, target: object, hook: str | None = None) -> dict[str, AnyCallable]:
    """The hooks of `target`, adapted to their specs, in the order of `kind.hooks`.

    `target` is a module, a class (instantiated here), an object with methods, or a function; a function
    stands for `hook`, else for the hook it is named after, else for the kind's main hook. Raises
    PluginLoadError if a hook is missing, misspelled or has the wrong signature.
    """
    if inspect.isclass(target):
        target = _instance(target)
    if isinstance(target, ModuleType):
        found = dict(_of_module(kind, target))
    else:
        found = dict(_of_object(kind, target))
        if callable(target) and (hook or kind.main_hook or next(iter(found), None)) not in found:
            found = {**_of_function(kind, module, target, hook), **found}
    _require(kind, found, target)
    return {name: adapted(name, found[name]) for name in kind.hooks if name in found}


def _instance(target: type) -> object:
    try:
        return target()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        what = f"cannot be instantiated without arguments: {said(error, target.__module__)}"
        raise PluginLoadError(f"{what}\n  give its __init__ defaults, or name an object") from error


def _of_module(kind: Kind, module: ModuleType) -> Iterator[tuple[str, AnyCallable]]:
    """Marked functions, and unmarked ones with a hook's name; what was imported from elsewhere is neither."""
    for name, value in list(vars(module).items()):
        if callable(value) and _defined_in(value, module):
            hook = _hook_name(kind, name, value)
            if hook is not None:
                yield hook, value


def _of_object(kind: Kind, target: object) -> Iterator[tuple[str, AnyCallable]]:
    """Methods, found without running properties: an object that answers to every name has no hook by that."""
    if inspect.isroutine(target):
        return
    for name in dir(target):
        static = inspect.getattr_static(target, name, None)
        function = getattr(static, "__func__", static)
        if callable(function) and not name.startswith("__"):
            # the marker is on the staticmethod or classmethod where it stands above that decorator
            hook = _hook_name(kind, name, function if _mark(static) is None else static)
            if hook is not None:
                yield hook, getattr(target, name)


def _of_function(kind: Kind, module: ModuleType, function: AnyCallable, hook: str | None) -> dict[str, AnyCallable]:
    """The function itself, and beside it the kind's other hooks: attributes of it, or of its module."""
    name = hook or _named_after(kind, function) or kind.main_hook
    if name is None:
        raise PluginLoadError(
            f"is a function, and {a(kind.name)} has the hooks {listed(kind.hooks)}\n"
            "  name the function after the one it is, or name its module instead"
        )
    found = {other: impl for other, impl in _of_module(kind, module) if impl is not function and other != name}
    if any(hook == name and impl is not function for hook, impl in _of_module(kind, module)):
        found.pop("message_key", None)  # it sorts messages by what the module's own matcher says, not this one
    for other in kind.hooks:
        beside = getattr(function, "__dict__", {}).get(other)
        if other != name and callable(beside):
            found[other] = beside
    return {**found, name: function}


def _named_after(kind: Kind, function: AnyCallable) -> str | None:
    name = getattr(function, "__name__", "")
    return _hook_name(kind, name, function)


def _hook_name(kind: Kind, name: str, function: object) -> str | None:
    """Which hook of `kind` this function is, if any; raises if it is marked and no kind has such a hook."""
    mark = _mark(function)
    if mark is None:
        return name if name in kind.hooks else None
    if mark.get("wrapper") or mark.get("hookwrapper"):
        raise PluginLoadError(
            f"marks {name} as a hook wrapper, and hooks of a chosen plugin have nothing to wrap\n"
            "  write a plain function with @hookimpl"
        )
    hook = str(mark.get("specname") or name)
    if hook not in _EVERY_HOOK and not mark.get("optionalhook"):
        close = meant(hook, kind.hooks) or meant(hook, _EVERY_HOOK)
        advice = f"did you mean {close}?" if close else f"{a(kind.name)} has the hooks {listed(kind.hooks)}"
        raise PluginLoadError(f"has a function marked as hook {hook!r}, which does not exist\n  {advice}")
    return hook if hook in kind.hooks else None


def _mark(function: object) -> Mapping[str, Any] | None:
    if isinstance(function, functools.partial):
        function = function.func
    mark = inspect.getattr_static(function, _MARK, None)
    return mark if isinstance(mark, dict) else None


def _defined_in(value: object, module: ModuleType) -> bool:
    """Whether the module, or a submodule of it, defines `value`: an imported `os.abort` is no hook."""
    if isinstance(value, functools.partial):
        value = value.func
    origin = str(getattr(value, "__module__", None) or type(value).__module__)
    return f"{origin}.".startswith(f"{module.__name__}.")


def _require(kind: Kind, found: Mapping[str, object], target: object) -> None:
    """Raise unless the kind's main hook is there (any hook, for kinds that do without); name the nearest."""
    if found and (kind.main_hook is None or kind.main_hook in found or kind.name in MAY_LACK_MAIN_HOOK):
        return
    wanted = kind.main_hook or listed(kind.hooks, "or")
    what = "has no hook" if not found else f"has {listed(found)}, and no {kind.main_hook}"
    raise PluginLoadError(f"{what}\n  {_nearest(kind, target, wanted)}")


def _nearest(kind: Kind, target: object, wanted: str) -> str:
    names = [name for name in dir(target) if not name.startswith("_")]
    for hook in (kind.main_hook,) if kind.main_hook else kind.hooks:
        value = getattr(target, hook, None) if hook in names else None
        if isinstance(target, ModuleType) and value is not None:
            origin = getattr(value, "__module__", None) or type(value).__module__
            return f"{hook} is there, imported from {origin}: name that module, or define {hook} here"
        close = meant(hook, names)
        if close:
            return f"found {close}; {a(kind.name)} defines {wanted}"
    return f"{a(kind.name)} defines {wanted}"
