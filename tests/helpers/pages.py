"""The documentation as a reader has it: pages, their headings, links and fenced blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
SITE = sorted((ROOT / "docs").rglob("*.md"))
"""The site's pages."""

EXAMPLES = sorted(
    path for path in (ROOT / "examples").rglob("README.md") if not {".venv", "node_modules"} & set(path.parts)
)
WRITTEN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *SITE, *EXAMPLES]
"""Everything that a user reads."""

_markdown = MarkdownIt("commonmark").enable("table")


@dataclass(frozen=True)
class Block:
    """A fenced block; `title` is the file that it is, or nothing."""

    page: str
    line: int
    language: str
    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def name_of(path: Path) -> str:
    """A page's path inside the project."""
    return path.relative_to(ROOT).as_posix()


def blocks_of(path: Path) -> Iterator[Block]:
    """A page's fenced blocks, in order."""
    for token in _markdown.parse(path.read_text(encoding="utf-8")):
        if token.type in ("fence", "code_block"):
            language, _, rest = token.info.strip().partition(" ")
            title = re.fullmatch(r'title="([^"]+)"', rest.strip())
            assert title or not rest, f"{name_of(path)}: a block's info is `{token.info}`, expected a title or nothing"
            line = token.map[0] + 1 if token.map else 0
            yield Block(name_of(path), line, language, title[1] if title else "", token.content)


def links_of(path: Path) -> Iterator[str]:
    """Where a page's links lead."""
    for token in _markdown.parse(path.read_text(encoding="utf-8")):
        for child in token.children or ():
            if child.type in ("link_open", "image"):
                target = child.attrGet("href" if child.type == "link_open" else "src")
                yield str(target)


def anchors_of(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    tokens = _markdown.parse(path.read_text(encoding="utf-8"))
    found: set[str] = set()
    for at, token in enumerate(tokens):
        if token.type == "heading_open":
            text = "".join(child.content for child in tokens[at + 1].children or () if child.type != "html_inline")
            slug = re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())
            found.add(slug)
    return found


def prose_of(path: Path) -> str:
    """A page without its blocks."""
    lines = path.read_text(encoding="utf-8").split("\n")
    for token in _markdown.parse("\n".join(lines)):
        if token.type == "fence" and token.map:
            lines[token.map[0] : token.map[1]] = [""] * (token.map[1] - token.map[0])
    return "\n".join(lines)
