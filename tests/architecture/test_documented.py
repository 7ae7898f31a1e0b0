"""Every plugin stands in the documentation; `tests/docs` holds the pages against everything else."""

from __future__ import annotations

import tomllib

import pytest

from helpers.pages import ROOT
from helpers.tables import docs

TEXT = "\n".join(path.read_text(encoding="utf-8") for path in docs())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PLUGINS = [name for entries in PROJECT["entry-points"].values() for name in entries]


@pytest.mark.parametrize("name", PLUGINS)
def test_every_plugin_is_documented(name: str) -> None:
    assert f"`{name}`" in TEXT, f"neither README.md nor docs/ name the plugin {name}"
