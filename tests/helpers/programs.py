"""Programs for the command agent, and a way to see whether one still runs."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path


def python(folder: Path, source: str) -> str:
    """The command line of a Python program with this source."""
    path = folder / f"program{len(list(folder.glob('program*')))}.py"
    path.write_text(source, encoding="utf-8")
    return f"{shlex.quote(sys.executable)} {shlex.quote(str(path))}"


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z" and os.path.exists(f"/proc/{pid}")


def wait_for_pids(path: Path) -> list[int]:
    """The process ids that a program writes into a file."""
    until = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < until, f"{path} was not written"
        time.sleep(0.01)
    return [int(word) for word in path.read_text().split()]
