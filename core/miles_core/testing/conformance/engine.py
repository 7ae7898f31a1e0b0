"""Checks of engines; `trials/engine.py` starts one, where there is a model for it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from miles_core.plugins import Plugin
from miles_core.testing.conformance.report import CheckFunction, Skip


def takes_its_configuration(plugin: Plugin) -> str | Skip | None:
    """An engine that does not take `config` cannot know which model to run."""
    if not plugin.has("launch_engine"):
        return Skip("has no launch_engine: it only configures SGLang")
    parameters = inspect.signature(plugin.hook("launch_engine")).parameters
    return None if parameters else "launch_engine does not take config"


def configures_sglang(plugin: Plugin) -> Skip | None:
    """`configure_sglang` is optional, and runs inside SGLang only."""
    return None if plugin.has("configure_sglang") else Skip("has no configure_sglang, which is optional")


CHECKS: Mapping[str, CheckFunction] = {
    "takes its configuration": takes_its_configuration,
    "configures SGLang": configures_sglang,
}
OPTIONAL = frozenset({"configures SGLang"})
