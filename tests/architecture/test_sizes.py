"""Files stay under 500 lines, function bodies under 60 lines of code."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("core", "plugins", "tests", "examples")
LONGEST_FILE = 500
LONGEST_BODY = 60

EXCEPTIONS: dict[str, str] = {}
"""`path` or `path::function` to the reason it may be longer. An entry that is no longer needed fails."""

NOT_CODE = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(source: str) -> set[int]:
    """Numbers of the lines that hold more than white space and comments."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Every function with its dotted name, those in classes and functions too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function | ast.ClassDef):
            name = f"{prefix}{node.name}"
            if isinstance(node, Function):
                yield name, node
            yield from functions(node, name + ".")
        else:
            yield from functions(node, prefix)


def body_length(function: Function, code: set[int]) -> int:
    """How many lines of code the body has, docstring and comments aside."""
    has_docstring = ast.get_docstring(function, clean=False) is not None
    statements = function.body[1:] if has_docstring else function.body
    return sum(1 for line in code if statements and statements[0].lineno <= line <= (function.end_lineno or 0))


def too_long(source: str, path: str) -> dict[str, str]:
    """What is over a limit in one file: its name in EXCEPTIONS, and the message."""
    found: dict[str, str] = {}
    lines = len(source.splitlines())
    if lines >= LONGEST_FILE:
        found[path] = f"{path}:1: {lines} lines, and the limit is under {LONGEST_FILE}; split it by what it does"
    code = code_lines(source)
    for name, function in functions(ast.parse(source)):
        length = body_length(function, code)
        if length >= LONGEST_BODY:
            found[f"{path}::{name}"] = (
                f"{path}:{function.lineno}: {name} has {length} lines of code, limit under {LONGEST_BODY}"
            )
    return found


def test_files_and_functions_are_small() -> None:
    found: dict[str, str] = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            found |= too_long(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
    broken = [message for name, message in found.items() if name not in EXCEPTIONS]
    stale = [f"{name} is within the limits: take it off EXCEPTIONS" for name in EXCEPTIONS if name not in found]
    assert not broken + stale, "\n" + "\n".join(broken + stale)


@pytest.mark.parametrize(("statements", "long"), [(LONGEST_BODY - 1, False), (LONGEST_BODY, True)])
def test_a_body_is_measured_in_lines_of_code(statements: int, long: bool) -> None:
    docstring = '    """First.\n\n' + "    more\n" * 80 + '    """\n'
    body = "    # why\n\n    x = 1\n" * statements
    assert ("f.py::C.f" in too_long(f"class C:\n  def f(self):\n{docstring}{body}", "f.py")) is long
