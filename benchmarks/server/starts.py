"""What starting costs: the server until it answers, its memory before the first session, and the commands.

Times are those of the processor, as far as they are shorter: on a machine that does other things too, they stay.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
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
    began = min(found, key=lambda each: each.starting)
    detail = {"waited s": began.started}
    yield Figure(name="start-up of a server", value=began.starting, bar=3.0, unit="s", detail=detail)
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


READING = 0.9
"""Seconds that reading Qwen3's tokenizer takes where nothing else runs."""


def slowness(bench: Bench) -> float:
    """How much longer this machine computes now: cores that others use too do less in a second. At least 1."""
    read = "import sys, tokenizers; tokenizers.Tokenizer.from_file(sys.argv[1])"
    command = [sys.executable, "-c", read, str(bench.tokenizer / "tokenizer.json")]
    return max(_seconds(command, dict(os.environ), repeats=2) / READING, 1.0)


def _install(folder: Path, name: str) -> None:
    """A distribution as most are: entry points of somebody else's."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n\n" + "Words. " * 500)
    (info / "entry_points.txt").write_text(f"[console_scripts]\n{name} = {name}:main\n")


def _seconds(command: Sequence[str], environment: dict[str, str], repeats: int = REPEATS) -> float:
    """What a command computes until it ends: that is how long it takes where nothing else runs."""
    best = float("inf")
    for _ in range(repeats):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            raise SystemExit(f"{' '.join(command)} failed")
        best = min(best, used.ru_utime + used.ru_stime)
    return best
