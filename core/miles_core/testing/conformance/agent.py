"""Checks of agents. Loading has checked that the hooks take nothing that is not given."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from miles_core.plugins import Plugin
from miles_core.testing.conformance.generator import registers_its_flags
from miles_core.testing.conformance.report import CheckFunction, Skip


def takes_the_session(plugin: Plugin) -> str | None:
    """An agent that does not take `base_url` and `prompt` cannot work on the sample in its session."""
    parameters = inspect.signature(plugin.hook("run_agent")).parameters.values()
    if any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters):
        return None
    missing = {"base_url", "prompt"} - {p.name for p in parameters}
    return f"run_agent does not take {' and '.join(sorted(missing))}" if missing else None


def passes_sampling_parameters_on(plugin: Plugin) -> str | None:
    """Without `request_kwargs` the rollout's temperature and token limits have no effect."""
    parameters = inspect.signature(plugin.hook("run_agent")).parameters.values()
    if any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) or p.name == "request_kwargs" for p in parameters):
        return None
    return "run_agent does not take request_kwargs, so sampling parameters have no effect on it"


def can_be_stopped(plugin: Plugin) -> Skip | None:
    """`abort` is optional."""
    return None if plugin.has("abort") else Skip("has no abort, which is optional")


CHECKS: Mapping[str, CheckFunction] = {
    "takes the session": takes_the_session,
    "passes sampling parameters on": passes_sampling_parameters_on,
    "can be stopped": can_be_stopped,
    "registers its flags": registers_its_flags,
}
OPTIONAL = frozenset({"can be stopped", "registers its flags"})
