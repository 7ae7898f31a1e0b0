"""Tables of the documentation, read as a program would."""

from __future__ import annotations

import re
from pathlib import Path

from helpers.pages import ROOT


def page(name: str) -> str:
    """A page's text, by its path inside the project."""
    return (ROOT / name).read_text(encoding="utf-8")


def section(text: str, heading: str) -> str:
    """What stands under a heading, up to the next one of its level or above. Raises AssertionError if there is none."""
    found = re.search(rf"^(#+) {re.escape(heading)}\s*$", text, re.MULTILINE)
    assert found is not None, f"there is no heading {heading!r}"
    rest = text[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def tables(text: str) -> list[list[list[str]]]:
    """Every table: its rows of cells, the head first. A `\\|` is no border."""
    found: list[list[list[str]]] = []
    inside = False
    for line in text.splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
        if not inside:
            found.append([])
        inside = True
        if not all(set(cell) <= set("-: ") and cell for cell in cells):
            found[-1].append(cells)
    return found


def table(text: str, *head: str) -> list[list[str]]:
    """The rows of the one table whose head begins with these cells."""
    fitting = [rows for rows in tables(text) if rows[0][: len(head)] == list(head)]
    assert len(fitting) == 1, f"{len(fitting)} tables begin with {head}"
    return fitting[0][1:]


def codes(cell: str) -> list[str]:
    """What stands between backticks."""
    return re.findall(r"`([^`]+)`", cell)


def docs() -> list[Path]:
    """The pages of the site and the README."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
