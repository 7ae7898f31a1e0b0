"""Check a hook function against its spec, and adapt what may differ.

A hook function may take fewer arguments than the spec gives, or `**kwargs`; it gets by name what it takes.
Where a hook is async, a plain function will do whose result can be awaited, which shows when it is called.
Matchers may name their two arguments as they like, and generate functions have two forms.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter
from typing import Any, Literal

from miles_core import hookspecs
from miles_core.errors import PluginLoadError
from miles_core.plugins.wording import a, listed, meant

AnyCallable = Callable[..., Any]

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def adapted(hook: str, function: AnyCallable) -> AnyCallable:
    """A callable that takes the spec's arguments and gives `function` those it accepts.

    Where nothing differs it is `function` itself; a generate function stays in its form (see
    `generate_form`). Raises PluginLoadError for a wrong argument, and for async where sync is due.
    """
    _check_colour(hook, function)
    parameters = _parameters(hook, function)
    if hook == "generate":
        generate_form(function)
        return function
    if _is_due_async(hook) and not is_async(function):
        function = _awaiting(function)
    given = tuple(_parameters(hook, getattr(hookspecs, hook)))
    names = [p.name for p in parameters.values() if p.kind in _POSITIONAL]
    if tuple(parameters) == given and all(p.kind is Parameter.POSITIONAL_OR_KEYWORD for p in parameters.values()):
        return function
    if hook == "message_matches" and _takes_pair(names, parameters, given):
        return _by_position(function)
    _check_arguments(hook, parameters, given)
    return _by_name(function, parameters, given)


_GENERATE_FORMS = "write generate(input), or generate(args, sample, sampling_params[, evaluation])"


def generate_form(function: AnyCallable) -> Literal["input", "args"]:
    """Which form a generate function has: `"input"`, or the older one that begins with `"args"`.

    The older one is `(args, sample, sampling_params[, evaluation])`. What counts is how many arguments must be given;
    where defaults or `*args` leave both open, the names `input`, or `args` and `sample`, tell. Raises PluginLoadError
    for neither form, and for what could be both.
    """
    parameters = _parameters("generate", function)
    kinds = {p.kind for p in parameters.values()}
    positional = [p for p in parameters.values() if p.kind in _POSITIONAL]
    names = [p.name for p in positional]
    required = sum(p.default is Parameter.empty for p in positional)
    by_keyword = {p.name for p in parameters.values() if p.default is p.empty and p.kind is p.KEYWORD_ONLY}
    open_end = Parameter.VAR_POSITIONAL in kinds
    takes_three = by_keyword <= {"evaluation"} and required <= 4 and (len(names) >= 3 or open_end)
    if takes_three and (required >= 3 or names[:2] == ["args", "sample"]):
        return "args"
    takes_one = not by_keyword and required <= 1 and bool(names)
    clear = not open_end and names[1:2] != ["sample"] and (required == 1 or len(names) < 3)
    if takes_one and (clear or names[0] == "input"):
        return "input"
    both = takes_three and not by_keyword and required <= 1
    raise PluginLoadError(
        f"has generate({', '.join(map(_spelled, parameters.values()))}), which "
        f"{'could be either form' if both else 'is neither form'} of a generate function\n  {_GENERATE_FORMS}"
    )


def _spelled(parameter: Parameter) -> str:
    """A parameter's name as it stands in a signature, with its stars."""
    if parameter.kind is Parameter.VAR_POSITIONAL:
        return f"*{parameter.name}"
    return f"**{parameter.name}" if parameter.kind is Parameter.VAR_KEYWORD else parameter.name


def is_async(function: AnyCallable) -> bool:
    """Whether calling `function` gives a coroutine, as far as its definition tells."""
    return inspect.iscoroutinefunction(_defined(function))


async def awaited(result: Any, function: AnyCallable) -> Any:
    """What comes of a call to an async hook, whose result `function` returned.

    Raises PluginLoadError where that cannot be awaited: the function is of the wrong kind, which loading cannot see.
    """
    if inspect.isawaitable(result):
        return await result
    where = _defined(function)
    name = getattr(where, "__qualname__", type(where).__qualname__)
    returned = "None" if result is None else a(type(result).__name__)
    raise PluginLoadError(
        f"{where.__module__}.{name} returned {returned}, which cannot be awaited\n"
        "  write `async def`, or return the coroutine of what it calls; blocking code goes into asyncio.to_thread"
    )


def _defined(function: AnyCallable) -> AnyCallable:
    """What is called where a partial or an object is: a function or a class."""
    while isinstance(function, functools.partial):
        function = function.func
    call = type(function).__call__
    return call if not inspect.isroutine(function) and inspect.isfunction(call) else function


def _is_due_async(hook: str) -> bool:
    return inspect.iscoroutinefunction(getattr(hookspecs, hook))


def _check_colour(hook: str, function: AnyCallable) -> None:
    if not _is_due_async(hook) and is_async(function):
        raise PluginLoadError(f"has an async {hook}, which is called without await\n  write a plain `def {hook}`")
    if inspect.isasyncgenfunction(_defined(function)):
        raise PluginLoadError(f"has a {hook} that yields\n  return the result")


def _awaiting(function: AnyCallable) -> AnyCallable:
    @functools.wraps(function)
    async def call(*args: object, **kwargs: object) -> Any:
        return await awaited(function(*args, **kwargs), function)

    return call


def _parameters(hook: str, function: AnyCallable) -> dict[str, Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError) as error:
        raise PluginLoadError(
            f"has a {hook} whose arguments cannot be read ({error})\n  wrap it in a Python function"
        ) from error


def _is_named(parameter: Parameter) -> bool:
    return parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def _takes_pair(names: Sequence[str], parameters: dict[str, Parameter], given: tuple[str, ...]) -> bool:
    """Whether two messages can be passed by position, no name of the spec standing in the other's place."""
    optional = [p for p in parameters.values() if p.name not in names[:2] and _is_named(p)]
    if any(p.default is Parameter.empty for p in optional):
        return False
    if len(names) < 2:
        return not names and any(p.kind is Parameter.VAR_POSITIONAL for p in parameters.values())
    return all(name not in given or given[index] == name for index, name in enumerate(names[:2]))


def _by_position(function: AnyCallable) -> AnyCallable:
    @functools.wraps(function)
    def message_matches(stored: object, replayed: object) -> Any:
        return function(stored, replayed)

    return message_matches


def _check_arguments(hook: str, parameters: dict[str, Parameter], given: tuple[str, ...]) -> None:
    for parameter in parameters.values():
        if not _is_named(parameter) or parameter.name in given or parameter.default is not Parameter.empty:
            continue
        close = meant(parameter.name, given)
        advice = f"did you mean {close}?" if close else "give it a default, or leave it out"
        raise PluginLoadError(
            f"has a {hook} with an argument {parameter.name!r} that the hook does not give"
            f" (it gives {listed(given)})\n  {advice}"
        )


def _by_name(function: AnyCallable, parameters: dict[str, Parameter], given: tuple[str, ...]) -> AnyCallable:
    """Binds the spec's arguments, and passes on those that `function` accepts."""
    kinds = {p.kind for p in parameters.values()}
    by_position = [p.name for p in parameters.values() if p.kind is Parameter.POSITIONAL_ONLY and p.name in given]
    named = [p.name for p in parameters.values() if _is_named(p) and p.name in given]
    if Parameter.VAR_KEYWORD in kinds:
        named = list(given)
    elif Parameter.VAR_POSITIONAL in kinds and not named:
        by_position = named = list(given)

    def bound(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
        values = {**dict(zip(given, args, strict=False)), **kwargs}
        positional = [values[name] for name in by_position]
        return function(*positional, **{name: values[name] for name in named if name not in by_position})

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> Any:
        return bound(args, kwargs)

    @functools.wraps(function)
    async def call_async(*args: object, **kwargs: object) -> Any:
        return await bound(args, kwargs)

    return call_async if is_async(function) else call
