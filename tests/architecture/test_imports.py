"""Imports go down the layers only, plugins use public names, heavy libraries wait until they are used."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "miles_core"
PLUGIN_PACKAGES = {path.name: path for path in sorted((ROOT / "plugins").glob("*/miles_*")) if path.is_dir()}

LAYERS = (
    ("types", "errors", "_version"),
    ("hookspecs",),
    ("tito",),
    ("session",),
    ("plugins",),
    ("engine",),
    ("rollout", "server"),
    ("testing",),
    ("cli",),
    ("__main__",),
)
"""Lowest first. Parts of one layer do not import each other."""

LAYER_OF = {part: number for number, parts in enumerate(LAYERS) for part in parts}

PLUGINS_MAY_IMPORT = (
    "miles_core.tito",
    "miles_core.types",
    "miles_core.hookspecs",
    "miles_core.errors",
    "miles_core.engine.base",
    "miles_core.engine.sglang_parsers",
    "miles_core.session.wire",
    "miles_core.rollout.generation",
    "miles_core.rollout.engines",
)
"""These modules and what is below them, beside the names in `miles_core.__all__`."""

LAZY_EXCEPTIONS = {
    "miles_engines.local_server": "miles_core.plugins",
    "miles_engines.sglang_server": "miles_core.plugins",
}
"""Inside functions only. Both load the chosen family themselves: its parser, its facts, its `configure_sglang`."""

HEAVY = frozenset({"torch", "transformers", "sglang", "ray", "fastapi"})
"""Never imported by importing a module; `heavy_allowed` has the exceptions."""


@dataclass(frozen=True)
class Import:
    """One imported module or name, and where the statement stands."""

    target: str
    line: int
    at_import: bool
    """Whether importing the module runs it: not in a function, not under `if TYPE_CHECKING`."""
    typing_only: bool


def imports_of(source: str, module: str, *, is_package: bool = False) -> Iterator[Import]:
    """Every import in the source, those in functions and under `if TYPE_CHECKING` too.

    `from a import b` gives `a.b`, which may be a module or a name in one.
    """
    package = module if is_package else module.rpartition(".")[0]

    def visit(node: ast.AST, in_function: bool, typing_only: bool) -> Iterator[Import]:
        for target in targets(node, package):
            at_import = not in_function and not typing_only
            yield Import(target, getattr(node, "lineno", 0), at_import, typing_only)
        inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        guarded = set(map(id, node.body)) if isinstance(node, ast.If) and is_type_checking(node.test) else set()
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside, typing_only or id(child) in guarded)

    yield from visit(ast.parse(source), False, False)


def targets(node: ast.AST, package: str) -> list[str]:
    """The dotted names a statement or an `import_module` call imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = package.split(".")
            base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
        return [f"{base}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
            return [node.args[0].value]
    return []


def is_type_checking(test: ast.expr) -> bool:
    """Whether the condition is `TYPE_CHECKING` or `typing.TYPE_CHECKING`."""
    return "TYPE_CHECKING" in (getattr(test, "id", ""), getattr(test, "attr", ""))


def within(name: str, module: str) -> bool:
    """Whether the dotted name is the module or something below it."""
    return name == module or name.startswith(module + ".")


def public_names() -> dict[str, str]:
    """The names in `miles_core.__all__`, each with the part of core that it comes from."""
    tree = ast.parse((CORE / "__init__.py").read_text(encoding="utf-8"))
    values = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    lazy: dict[str, str] = ast.literal_eval(values["_LAZY"])
    names: list[str] = ast.literal_eval(values["__all__"])
    return {name: lazy[name].split(".")[1] if name in lazy else "errors" for name in names}


PUBLIC = public_names()


def core_faults(module: str, found: Import) -> Iterator[str]:
    """What is wrong with an import in core."""
    own = module.split(".")[1] if "." in module else None
    if found.target.split(".")[0] in PLUGIN_PACKAGES:
        yield f"core never imports a plugin package, and this imports {found.target}"
    if own is None or not within(found.target, "miles_core"):
        return
    imported = found.target.split(".")[1] if "." in found.target else "errors"
    part = PUBLIC.get(imported, imported)
    if part == own or (own == "hookspecs" and found.typing_only):
        return
    unknown = [name for name in (own, part) if name not in LAYER_OF]
    if unknown:
        yield f"miles_core.{unknown[0]} has no place in LAYERS (tests/architecture/test_imports.py)"
    elif LAYER_OF[part] > LAYER_OF[own]:
        yield f"miles_core.{own} is below miles_core.{part}, and imports {found.target} from it"
    elif LAYER_OF[part] == LAYER_OF[own]:
        yield f"miles_core.{own} and miles_core.{part} stand side by side, and this imports {found.target}"


def plugin_faults(module: str, found: Import) -> Iterator[str]:
    """What is wrong with an import in a plugin package."""
    package, top = module.split(".")[0], found.target.split(".")[0]
    if top in PLUGIN_PACKAGES and top != package:
        yield f"{package} imports {found.target}: plugin packages never import each other"
    if top != "miles_core" or found.target == "miles_core":
        return
    name = found.target.split(".")[1]
    if name in PUBLIC or any(within(found.target, allowed) for allowed in PLUGINS_MAY_IMPORT):
        return
    for where, what in LAZY_EXCEPTIONS.items():
        if within(module, where) and within(found.target, what):
            if found.at_import:
                yield f"{where} may import {what} inside a function only"
            return
    allowed_modules = ", ".join(PLUGINS_MAY_IMPORT)
    yield f"{found.target} is internal to core: plugins import its public names and {allowed_modules}"


def heavy_allowed(module: str, library: str) -> bool:
    """Where a heavy library may be imported with the module."""
    if library == "fastapi":
        return within(module, "miles_core.server") or within(module, "miles_engines")
    return within(module, "miles_engines.local_server")


def faults(source: str, module: str, *, is_package: bool = False) -> list[tuple[int, str]]:
    """Line and text of every import that breaks the contract."""
    check = core_faults if module.split(".")[0] == "miles_core" else plugin_faults
    result = []
    for found in imports_of(source, module, is_package=is_package):
        result += [(found.line, text) for text in check(module, found)]
        library = found.target.split(".")[0]
        if library in HEAVY and found.at_import and not heavy_allowed(module, library):
            result.append((found.line, f"{library} is imported with the module; import it where it is used"))
    return sorted(set(result))


def sources() -> Iterator[tuple[Path, str]]:
    """Every source file of core and the plugins, with its module's name."""
    for package in (CORE, *PLUGIN_PACKAGES.values()):
        for path in sorted(package.rglob("*.py")):
            parts = list(path.relative_to(package.parent).with_suffix("").parts)
            yield path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_the_tree_keeps_the_import_contract() -> None:
    broken = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path, module in sources()
        for line, text in faults(path.read_text(encoding="utf-8"), module, is_package=path.name == "__init__.py")
    ]
    assert not broken, "\n" + "\n".join(broken)


@pytest.mark.parametrize(
    ("module", "source", "text"),
    [
        ("miles_core.tito.join", "from miles_core.session.tree import Tree", "miles_core.tito is below"),
        ("miles_core.tito.join", "def f():\n    import miles_core.cli", "miles_core.tito is below"),
        (
            "miles_core.types",
            "if TYPE_CHECKING:\n    from miles_core.tito import x",
            "miles_core.types is below",
        ),
        ("miles_core.tito.join", "from ..server import app", "miles_core.tito is below"),
        ("miles_core.session.turn", "from miles_core import Engine", "miles_core.session is below"),
        ("miles_core.server.app", "from miles_core.rollout import data", "side by side"),
        ("miles_core.surprise", "import miles_core.types", "has no place in LAYERS"),
        ("miles_core.cli.list", "import miles_agents.calculator", "core never imports a plugin package"),
        ("miles_core.cli.list", "import_module('miles_agents.x')", "core never imports a plugin package"),
        ("miles_core.cli.list", "import torch", "torch is imported with the module"),
        (
            "miles_core.cli.list",
            "class A:\n    from fastapi import FastAPI",
            "fastapi is imported with the module",
        ),
        ("miles_agents.calculator", "from miles_matchers import strict", "never import each other"),
        ("miles_agents.calculator", "from miles_core.session.tree import Tree", "is internal to core"),
        ("miles_agents.calculator", "from miles_core import server", "is internal to core"),
        ("miles_engines.local", "def f():\n    from miles_core.plugins import load", "is internal to core"),
        ("miles_engines.local_server", "from miles_core.plugins import load", "inside a function only"),
    ],
)
def test_an_import_that_breaks_the_contract_is_named(module: str, source: str, text: str) -> None:
    assert any(text in fault for _, fault in faults(source, module)), faults(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("miles_core.cli.serve", "from miles_core.server.app import create_app"),
        ("miles_core.session.turn", "from miles_core import MilesError"),
        ("miles_core.tito.join", "from .render import render"),
        ("miles_core.hookspecs", "if TYPE_CHECKING:\n    from miles_core.engine.base import Engine"),
        ("miles_core.server.app", "from fastapi import FastAPI"),
        ("miles_core.tito.tokenizer", "def f():\n    import transformers"),
        ("miles_core.cli.engine", "if TYPE_CHECKING:\n    import torch"),
        ("miles_agents.calculator", "from miles_core import hookimpl, Sample"),
        ("miles_agents.calculator", "from miles_core.engine.base import Engine"),
        ("miles_tito_families.qwen3", "from miles_core.tito.family import TitoFamily"),
        ("miles_engines.local_server.app", "import torch\ndef f():\n    from miles_core.plugins import load"),
    ],
)
def test_an_import_within_the_contract_passes(module: str, source: str) -> None:
    assert faults(source, module) == []
