"""The site builds without a warning, old addresses lead on, every link resolves, nothing is loaded from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urldefrag, urlparse

import pytest

from helpers.pages import EXAMPLES, ROOT, anchors_of, links_of, name_of

ANCHORS = {
    "agentic-rollout": (
        "choose-replay-matching", "pick-your---tito-model", "configure-the-wrapper", "write-the-agent-loop",
        "optional-teardown-hook", "leave-token-ownership-to-miles", "choose-the-session-behavior",
        "verify-a-new-model-tito",
    ),
}  # fmt: skip
"""What people link to."""

MOVED = {
    "rollout-endpoints": "generate-endpoint",
    "agentic-chat-template": "agentic-rollout",
    "customization": "hooks",
}


class Page(HTMLParser):
    """Anchors, links and what a browser loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if name := given.get("id") or given.get("name"):
            self.anchors.add(name)
        if tag == "a" and given.get("href"):
            self.links.append(str(given["href"]))
        if tag in ("script", "img", "iframe") and given.get("src"):
            self.loads.append(str(given["src"]))
        if tag == "link" and given.get("rel") in ("stylesheet", "preconnect", "preload", "icon"):
            self.loads.append(str(given.get("href")))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    quiet = {"NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)],
        cwd=ROOT, env={**os.environ, **quiet}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


def test_every_link_and_anchor_leads_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    broken = []
    for path, page in pages.items():
        for link in page.links:
            target, anchor = urldefrag(link)
            if urlparse(link).scheme or path.name == "404.html":
                continue
            there = (path.parent / target).resolve() if target else path
            there = there / "index.html" if there.is_dir() else there
            if there not in pages or (anchor and anchor not in pages[there].anchors and anchor != "__skip"):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert len(pages) > 12
    assert not broken, "\n".join(["", *broken])


@pytest.mark.parametrize(("address", "anchor"), [(a, anchor) for a, anchors in ANCHORS.items() for anchor in anchors])
def test_anchors_that_people_link_to_exist(site: Path, pages: dict[Path, Page], address: str, anchor: str) -> None:
    assert anchor in pages[site / address / "index.html"].anchors


@pytest.mark.parametrize("old", MOVED)
def test_old_addresses_lead_on_with_their_anchor(site: Path, old: str) -> None:
    text = (site / old / "index.html").read_text(encoding="utf-8")
    assert re.search(rf'<meta http-equiv="refresh" content="0; ?url=\.\./{MOVED[old]}/"', text)
    assert "window.location.hash" in text


def test_a_page_loads_nothing_from_elsewhere(pages: dict[Path, Page]) -> None:
    assert not [load for page in pages.values() for load in page.loads if urlparse(load).netloc]


@pytest.mark.parametrize("path", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *EXAMPLES], ids=name_of)
def test_links_of_pages_outside_the_site_lead_somewhere(path: Path) -> None:
    for link in links_of(path):
        target, anchor = urldefrag(link)
        if urlparse(link).scheme:
            continue
        there = path.parent / target if target else path
        assert there.exists(), link
        assert not anchor or anchor in anchors_of(there), link
