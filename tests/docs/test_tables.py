"""What the pages say of families, hooks, errors, plugins and miles' names is what the code says."""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from helpers.pages import ROOT, WRITTEN, blocks_of
from helpers.program import COMMANDS, flags, options
from helpers.tables import codes, page, section, table
from miles_core import errors, hookspecs
from miles_core.plugins import Registry
from miles_core.plugins.families import family_of
from miles_core.rollout import compat
from miles_core.rollout.compat.names import MODULES
from miles_core.tito import TitoFamily

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ENTRIES: Mapping[str, Mapping[str, str]] = PROJECT["entry-points"]
AGENTIC, FAMILIES, HOOKS = page("docs/agentic-rollout.md"), page("docs/families.md"), page("docs/hooks.md")


@pytest.fixture(scope="module")
def families() -> dict[str, TitoFamily]:
    registry = Registry.discover()
    return {
        name: family_of(registry.load("family", f"miles-plugins:{name}")) for name in ENTRIES["miles.tito_families"]
    }


def test_the_table_of_families_has_their_revisions(families: dict[str, TitoFamily]) -> None:
    rows = {codes(row[0])[0]: codes(row[2]) for row in table(FAMILIES, "family", "models", "revisions")}
    known = {
        name: [] if len(family.revisions) == 1 else [revision.name for revision in family.revisions]
        for name, family in families.items()
    }
    assert rows == known


def test_the_agents_table_of_families_has_their_facts(families: dict[str, TitoFamily]) -> None:
    rows = {codes(row[0])[0]: row[1:] for row in table(AGENTIC, "family", "models", "can append")}
    known = {
        name: [
            family.summary,
            ", ".join(family.allowed_append_roles),
            ", ".join(f"`{parser}`" for parser in (family.reasoning_parser, family.tool_call_parser) if parser),
        ]
        for name, family in families.items()
    }
    assert rows == known


HOOK_SPECS = {name: value for name, value in vars(hookspecs).items() if hasattr(value, f"{hookspecs.PROJECT}_spec")}


Function = ast.FunctionDef | ast.AsyncFunctionDef


def signatures_of(path: Path) -> list[tuple[str, Function]]:
    """Every signature that a page shows, by its name."""
    found = []
    for block in blocks_of(path):
        if block.language == "pyi":
            for node in ast.parse(block.text).body:
                assert isinstance(node, Function), block
                found.append((node.name, node))
    return found


def documented_signatures() -> dict[str, Function]:
    """The first signature of each hook on the page of hooks."""
    return dict(reversed(signatures_of(ROOT / "docs" / "hooks.md")))


def spelled(annotation: object) -> str:
    """A type as pages write it: without what dictionaries hold, and nothing for `Any`."""
    return re.sub(r"^Any$", "", re.sub(r"dict\[[^\]]*\]", "dict", str(annotation)))


def test_every_hook_is_documented_and_no_other() -> None:
    assert set(documented_signatures()) == set(HOOK_SPECS)
    assert set(re.findall(r"^## `(\w+)`$", HOOKS, re.MULTILINE)) == set(HOOK_SPECS)


@pytest.mark.parametrize("name", HOOK_SPECS)
def test_a_hook_has_the_signature_of_its_page(name: str) -> None:
    check_signature(documented_signatures()[name])


def test_a_hook_has_the_same_signature_on_every_page() -> None:
    shown = [node for path in WRITTEN for name, node in signatures_of(path) if name in HOOK_SPECS]
    older = [node for node in shown if node.name == "generate" and node.args.args[0].arg == "args"]
    assert len(older) == 1, "the older form of generate functions stands on the page of hooks"
    for node in shown:
        if node not in older:
            check_signature(node)


def check_signature(node: Function) -> None:
    spec = HOOK_SPECS[node.name]
    given = [
        (argument.arg, ast.unparse(argument.annotation) if argument.annotation else "") for argument in node.args.args
    ]
    known = inspect.signature(spec).parameters.values()
    assert given == [(parameter.name, spelled(parameter.annotation)) for parameter in known]
    assert isinstance(node, ast.AsyncFunctionDef) == inspect.iscoroutinefunction(spec)
    assert (ast.unparse(node.returns) if node.returns else "") == spelled(spec.__annotations__["return"])


@pytest.mark.parametrize("name", HOOK_SPECS)
def test_a_hook_is_in_the_row_of_its_kind_with_its_flag(name: str) -> None:
    rows = table(HOOKS, "kind", "entry-point group", "hooks", "chosen with")
    assert {codes(row[1])[0] for row in rows} == set(ENTRIES)
    assert any(name in codes(row[2]) for row in rows)
    known = {flag for command in COMMANDS.values() for option in options(command) for flag in flags(option)}
    assert {flag for row in rows for flag in codes(row[3])} <= known


@pytest.mark.parametrize("name", HOOK_SPECS)
def test_the_section_of_a_hook_names_what_chooses_it(name: str) -> None:
    rows = table(HOOKS, "kind", "entry-point group", "hooks", "chosen with")
    chosen = {flag for row in rows if name in codes(row[2]) for flag in codes(row[3])}
    assert chosen & set(re.findall(r"`(--[a-z-]+)", section(HOOKS, f"`{name}`")))


ERRORS = {
    name: value
    for name, value in inspect.getmembers(errors, inspect.isclass)
    if issubclass(value, errors.MilesError) and value.__module__ == errors.__name__
}


def test_every_error_is_documented_and_no_other() -> None:
    rows = {codes(row[0])[0]: row[1] for row in table(page("docs/errors.md"), "class", "status")}
    assert set(rows) == set(ERRORS)
    assert all(str(error.status) in rows[name] for name, error in ERRORS.items())


def test_every_built_in_is_in_the_readme_and_no_other() -> None:
    kinds = {"family": "miles.tito_families", "sample hook": "miles.sample_hooks"}
    rows = table(section(page("README.md"), "Built in"), "kind", "name")
    for kind in {row[0] for row in rows}:
        named = {name for row in rows if row[0] == kind for name in codes(row[1])}
        known = set(ENTRIES[kinds.get(kind, f"miles.{kind}s")])
        known = {"qwen3", "qwen35", "qwennext", "glm47", "nemotron3", "default"} if kind == "family" else known
        assert named == known, kind
    assert {kinds.get(row[0], f"miles.{row[0]}s") for row in rows} | {"miles.matchers"} == set(ENTRIES)


MILES = page("docs/coming-from-miles.md")


def test_the_modules_that_can_be_imported_are_all_in_the_table() -> None:
    rows = {codes(row[0])[0]: codes(row[1]) for row in table(section(MILES, "Modules"), "name", "what")}
    paths = {path.rpartition(".")[0] for kind in compat.BUILT_IN.values() for path in kind}
    assert set(rows) == {name for name in MODULES if name not in paths or name in rows}
    for name, named in rows.items():
        assert {each for each in named if "." not in each} == set(MODULES[name])


def test_dotted_defaults_mean_the_built_ins_of_the_table() -> None:
    rows = {codes(row[0])[0]: codes(row[1])[0] for row in table(MILES, "path", "plugin")}
    assert rows == {path: plugin for kind in compat.BUILT_IN.values() for path, plugin in kind.items()}


def test_the_flags_of_miles_are_accepted_where_the_table_says_so() -> None:
    rows = table(MILES, "miles", "here", "of")
    for theirs, ours, of in rows:
        for name in [name for name in codes(of) if name in COMMANDS]:
            same = [set(flags(option)) for option in options(COMMANDS[name])]
            assert any({codes(theirs)[0], codes(ours)[0]} <= names for names in same), (theirs, name)
    assert rows
