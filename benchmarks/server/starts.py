"""What starting costs: the server until it answers, its memory before the first session, and the commands."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from processes import Bench
from report import Figure

DISTRIBUTIONS = 300
REPEATS = 7
NOWHERE = "http://127.0.0.1:9"


def starts(bench: Bench, *, short: bool = False) -> Iterator[Figure]:
    """Start-up and idle memory, the least of several starts."""
    found = [bench.server(NOWHERE) for _ in range(2 if short else 4)]
    yield Figure(name="start-up of a server", value=min(each.started for each in found), bar=3.0, unit="s")
    yield Figure(name="memory of an idle server", value=min(each.memory() for each in found), bar=200.0, unit="MB")


def commands(bench: Bench, *, short: bool = False) -> Iterator[Figure]:
    """Commands where hundreds of distributions are installed, the least of several runs."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(DISTRIBUTIONS):
            _install(Path(folder), f"made_up_{number}")
        paths = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": paths}
        cli = [sys.executable, "-m", "miles_core"]
        bare = _seconds([sys.executable, "-c", ""], environment)
        ours = _seconds([sys.executable, "-c", "import miles_core"], environment)
        for name, command in (("list", [*cli, "list"]), ("--help", [*cli, "--help"])):
            yield Figure(name=f"miles-plugins {name}", value=_seconds(command, environment), bar=0.2, unit="s")
        yield Figure(name="import miles_core, over bare Python", value=(ours - bare) * 1e3, bar=50.0, unit="ms")


def _install(folder: Path, name: str) -> None:
    """A distribution as most are: entry points of somebody else's."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n\n" + "Words. " * 500)
    (info / "entry_points.txt").write_text(f"[console_scripts]\n{name} = {name}:main\n")


def _seconds(command: Sequence[str], environment: dict[str, str]) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        began = time.perf_counter()
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        best = min(best, time.perf_counter() - began)
    return best
