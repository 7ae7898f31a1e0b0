"""What starting the command imports: nothing heavy, and no plugin."""

from __future__ import annotations

import subprocess
import sys

import pytest

from helpers.distributions import AGENT, Site, distribution, module

HEAVY = {"torch", "transformers", "sglang", "fastapi", "ray", "numpy", "tokenizers", "jinja2", "rich", "pydantic"}

_REPORT = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); "


def imported(site: Site, statement: str) -> set[str]:
    """Top-level modules after running `statement` where only the site and the libraries can be imported."""
    command = [sys.executable, "-S", "-c", _REPORT + statement]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=site.env(), check=False)
    assert result.returncode == 0, result.stderr
    return {name.partition(".")[0] for name in result.stderr.split()}


@pytest.mark.parametrize(
    "statement",
    [
        "import miles_core",
        "from miles_core import hookimpl",
        "from miles_core.plugins import Registry; Registry.discover()",
        "from miles_core.cli import main; main(['--help'])",
        "from miles_core.cli import main; main(['list'])",
        "from miles_core.cli import main; main(['list', '--json'])",
    ],
)
def test_nothing_heavy_and_no_plugin_is_imported(site: Site, statement: str) -> None:
    distribution(site.path, "zz-a", agents={"p": "zz_plugin"})
    module(site.path, "zz_plugin", AGENT)
    assert imported(site, statement) & (HEAVY | {"zz_plugin"}) == set()
