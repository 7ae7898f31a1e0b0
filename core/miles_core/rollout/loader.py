"""Bind a generate function: either form, a class, a plugin or a dotted path, to one callable."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from inspect import Parameter
from typing import Any, TypeAlias

from miles_core.errors import ConfigError, PluginContractError, PluginError, PluginLoadError, PluginNotFound
from miles_core.plugins import Registry
from miles_core.plugins.signatures import awaited, generate_form
from miles_core.types import GenerateFnInput, GenerateFnOutput, Sample

Generate: TypeAlias = Callable[[GenerateFnInput], Awaitable[GenerateFnOutput]]
"""A generate function, whichever form it was written in."""

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def load_generate_function(source: Any) -> Generate:
    """One callable for `source`: a plugin's name, a dotted path, a loaded plugin, a function, a class or an instance.

    A class is instantiated without arguments. `add_arguments`, where the source has it, is kept. Raises MilesError
    for what cannot be loaded, and for a signature that is neither form, or could be both.
    """
    target, flags = _resolve(source)
    name = getattr(target, "__qualname__", type(target).__qualname__)
    call = _adapt(target, name)

    async def generate(input: GenerateFnInput) -> GenerateFnOutput:
        return _checked(await awaited(call(input), target), name)

    if flags is not None:
        generate.add_arguments = flags  # type: ignore[attr-defined]
    return generate


def _resolve(source: Any) -> tuple[Any, Any]:
    """The callable, and its `add_arguments` if it has one."""
    if isinstance(source, str):
        source = _plugin(source)
    if hasattr(source, "hook") and hasattr(source, "has"):
        return source.hook("generate"), source.hook("add_arguments") if source.has("add_arguments") else None
    if inspect.isclass(source):
        source = _instance(source)
    if not callable(source):
        raise ConfigError(f"{source!r} is no generate function; accepted: a plugin, a dotted path, a callable")
    return source, getattr(source, "add_arguments", None)


def _plugin(selector: str) -> Any:
    try:
        return Registry.discover().load("generator", selector)
    except PluginNotFound as error:
        raise ConfigError(f"generate function {selector!r}: {error.message}") from error
    except PluginError as error:
        raise type(error)(f"generate function {selector!r}: {error.message}") from error


def _instance(source: type) -> Any:
    try:
        return source()
    except Exception as error:
        raise PluginLoadError(
            f"generate function {source.__qualname__} cannot be instantiated without arguments: {error}; "
            "give its __init__ defaults, or an instance"
        ) from error


def _adapt(target: Any, name: str) -> Callable[[GenerateFnInput], Any]:
    """`target` as a function of one input; a signature of neither form is an error now, not per sample."""
    try:
        form = generate_form(target)
    except PluginLoadError as error:
        raise PluginLoadError(f"generate function {name} {error.message}") from error
    if form == "input":
        return lambda given: target(given)
    parameters = inspect.signature(target).parameters
    named = "evaluation" in parameters
    fourth = not named and sum(p.default is p.empty and p.kind in _POSITIONAL for p in parameters.values()) == 4

    def older(given: GenerateFnInput) -> Any:
        extra = (given.evaluation,) if fourth else ()
        keywords = {"evaluation": given.evaluation} if named else {}
        return target(given.args, given.sample, given.sampling_params, *extra, **keywords)

    return older


def _checked(result: Any, name: str) -> GenerateFnOutput:
    output = result if isinstance(result, GenerateFnOutput) else GenerateFnOutput(result)
    samples = output.as_list()
    if not samples or not all(isinstance(sample, Sample) for sample in samples):
        kinds = ", ".join(type(sample).__name__ for sample in samples) or "an empty list"
        raise PluginContractError(
            f"generate function {name} returned {kinds}; expected a Sample, a list of them, or GenerateFnOutput"
        )
    return output
