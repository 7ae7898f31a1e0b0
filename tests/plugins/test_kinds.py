"""The table of kinds agrees with the hook specs."""

from __future__ import annotations

import inspect

from miles_core import hookspecs
from miles_core.plugins import KINDS


def specs() -> set[str]:
    return {name for name, value in vars(hookspecs).items() if hasattr(value, "miles_spec")}


def test_every_hook_belongs_to_a_kind_and_every_kind_has_hooks_only() -> None:
    assert {hook for kind in KINDS.values() for hook in kind.hooks} == specs()


def test_every_kind_has_a_contract_version() -> None:
    assert set(hookspecs.CONTRACT_VERSIONS) == set(KINDS)


def test_the_main_hook_is_one_of_the_hooks() -> None:
    assert all(kind.main_hook in (None, *kind.hooks) for kind in KINDS.values())


def test_every_hook_is_documented() -> None:
    assert all(inspect.getdoc(getattr(hookspecs, hook)) for hook in specs())
