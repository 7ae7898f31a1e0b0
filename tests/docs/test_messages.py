"""The messages of the page on errors are those that the code writes, and it has every one that a client can get."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.pages import ROOT
from helpers.tables import codes, page, tables
from miles_core import errors

ERRORS = page("docs/errors.md")
ANSWERED = ("session", "server", "engine", "tito")
"""The parts of core whose errors become answers of the session server."""

AT_START_UP = (errors.ConfigError, errors.PluginError, errors.EngineStartError, errors.WireError)
"""Errors that no client of the server gets."""


def spelled(node: ast.expr) -> str | None:
    """A text as the page writes it, `…` for a value; None for what is no text. Adjacent literals are one."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            both = spelled(left), spelled(right)
            return None if both == (None, None) else "".join(text or "…" for text in both)
    return None


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from (ROOT / folder).rglob("*.py")


def texts(path: Path) -> set[str]:
    """Every text of a module but its docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.expr) and id(node) not in prose)
    return {text for node in nodes if (text := spelled(node)) is not None}


def raised(path: Path) -> Iterator[str]:
    """The messages that a module gives to errors which a client can get."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            named = getattr(errors, node.func.id, None)
            if inspect.isclass(named) and issubclass(named, errors.MilesError) and not issubclass(named, AT_START_UP):
                text = spelled(node.args[0])
                if text is not None and text.strip("… :"):
                    yield text


MESSAGES = sorted({
    message.replace("\\|", "|")
    for rows in tables(ERRORS)
    if rows[0] == ["message", "cause", "way out"]
    for row in rows[1:]
    for message in codes(row[0])
})  # fmt: skip


def pattern(message: str) -> re.Pattern[str]:
    """What has the words of a message in their order; values stand between them."""
    return re.compile(".*".join(map(re.escape, message.split("…"))), re.DOTALL)


WRITTEN = {text for path in sources("core", "plugins") for text in texts(path)}


@pytest.mark.parametrize("message", MESSAGES)
def test_a_documented_message_is_one_that_the_code_writes(message: str) -> None:
    assert len(message.replace("…", "").strip(" :,()")) >= 6, "too few words to tell it from others"
    rarest = max(message.split("…"), key=len)
    assert any(pattern(message).search(text) for text in WRITTEN if rarest in text), "nothing writes it"


def test_every_message_that_a_client_can_get_is_documented() -> None:
    known = [pattern(message) for message in MESSAGES]
    parts = [f"core/miles_core/{part}" for part in ANSWERED]
    admin = ROOT / "core" / "miles_core" / "server" / "admin.py"  # refuses bodies in words that name the way out
    found = {(path, text) for path in sources(*parts) if path != admin for text in raised(path)}
    assert len(found) > 50
    missing = [f"{path.relative_to(ROOT)}: {text}" for path, text in found if not any(p.search(text) for p in known)]
    assert not missing, "\n".join(["docs/errors.md lacks", *sorted(missing)])
