"""Bind a generate function: either form, a class, a plugin or a dotted path, to one callable."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any, TypeAlias

from miles_core.errors import ConfigError, PluginContractError, PluginLoadError
from miles_core.plugins.signatures import generate_form
from miles_core.types import GenerateFnInput, GenerateFnOutput, Sample

Generate: TypeAlias = Callable[[GenerateFnInput], Awaitable[GenerateFnOutput]]
"""A generate function, whichever form it was written in."""


def load_generate_function(source: Any) -> Generate:
    """One callable for `source`: a dotted path, a loaded plugin, a function, a class or an instance.

    A class is instantiated without arguments. `add_arguments`, where the source has it, is kept.
    """
    target = _resolve(source)
    if inspect.isclass(target):
        target = target()
    name = getattr(target, "__qualname__", type(target).__qualname__)
    call = _adapt(target, name)

    async def generate(input: GenerateFnInput) -> GenerateFnOutput:
        return _checked(await call(input), name)

    if hasattr(target, "add_arguments"):
        generate.add_arguments = target.add_arguments  # type: ignore[attr-defined]
    return generate


def _resolve(source: Any) -> Any:
    if isinstance(source, str):
        return _import(source)
    if hasattr(source, "hook") and hasattr(source, "has"):
        return source.hook("generate")
    if not callable(source):
        raise ConfigError(f"{source!r} is no generate function; accepted: a plugin, a dotted path, a callable")
    return source


def _import(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"generate function {path!r}: {error}; give package.module.function") from error


def _adapt(target: Any, name: str) -> Callable[[GenerateFnInput], Any]:
    """`target` as a function of one input; a signature of neither form is an error now, not per sample."""
    try:
        form = generate_form(target)
    except PluginLoadError as error:
        raise PluginLoadError(f"generate function {name} {error.message}") from error
    if form == "input":
        return lambda given: target(given)
    evaluation = "evaluation" in inspect.signature(target).parameters
    return lambda given: _call_older_form(target, given, evaluation)


def _call_older_form(target: Any, given: GenerateFnInput, evaluation: bool) -> Any:
    extra = (given.evaluation,) if evaluation else ()
    return target(given.args, given.sample, given.sampling_params, *extra)


def _checked(result: Any, name: str) -> GenerateFnOutput:
    output = result if isinstance(result, GenerateFnOutput) else GenerateFnOutput(result)
    samples = output.as_list()
    if not samples or not all(isinstance(sample, Sample) for sample in samples):
        kinds = ", ".join(type(sample).__name__ for sample in samples) or "an empty list"
        raise PluginContractError(
            f"generate function {name} returned {kinds}; expected a Sample, a list of them, or GenerateFnOutput"
        )
    return output
