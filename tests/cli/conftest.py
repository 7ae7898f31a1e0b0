"""A site of hand-made distributions for the real command."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.distributions import Site


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """An empty site; `site.run(...)` runs `miles-plugins` against it alone."""
    path = tmp_path / "site"
    path.mkdir()
    return Site(path)
