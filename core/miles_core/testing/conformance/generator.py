"""Checks of generate functions."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from miles_core.plugins import Plugin
from miles_core.plugins.signatures import generate_form
from miles_core.testing.conformance.report import CheckFunction, Skip


def has_one_of_the_forms(plugin: Plugin) -> None:
    """`generate(input)`, or `generate(args, sample, sampling_params[, evaluation])`; raises otherwise."""
    generate_form(plugin.hook("generate"))


def registers_its_flags(plugin: Plugin) -> str | Skip | None:
    """`add_arguments` adds flags that may be left out, so that other commands still parse."""
    if not plugin.has("add_arguments"):
        return Skip("has no add_arguments, which is optional")
    parser = argparse.ArgumentParser(exit_on_error=False)
    plugin.call("add_arguments", parser)
    required = [action.dest for action in parser._actions if action.required]
    return f"makes {', '.join(required)} required; give a default" if required else None


CHECKS: Mapping[str, CheckFunction] = {
    "has one of the two forms": has_one_of_the_forms,
    "registers its flags": registers_its_flags,
}
OPTIONAL = frozenset({"registers its flags"})
