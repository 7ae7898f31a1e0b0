"""Runs a command, and sees to it that nothing of it is left: `python keeper.py FOLDER COMMAND...`.

The keeper is between the launcher and SGLang, which is a tree of processes. It stops the tree when it is told to
(SIGTERM, SIGINT), when the command ends, and when the launcher is gone, however that ended: its standard input is then
closed. On Linux it adopts what the tree orphans, and is itself what the command does not outlive. It exits as the
command did. FOLDER, if it is not empty, is removed where the launcher can no longer do that. Nothing but the standard
library is imported, so that it starts in no time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE = 8.0
"""Seconds between asking the command to stop and killing its tree."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(folder: str, command: list[str]) -> int:
    """Run the command to its end, or to ours; its exit code, negative for a signal."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
    if prctl is not None:
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: told.append(number))
    signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def outlive_nobody() -> None:
        signal.set_wakeup_fd(-1)
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=outlive_nobody)
    orphaned = wait(child, reader, told)
    if child.poll() is None and not orphaned:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE)
    kill_all(child)
    if orphaned and folder:
        shutil.rmtree(folder, ignore_errors=True)
    return child.wait()


def wait(child: subprocess.Popen[bytes], reader: int, told: list[int]) -> bool:
    """Until the command has ended, or we are told to end it; whether the launcher is gone."""
    while child.poll() is None and not told:
        ready, _, _ = select.select([reader, 0], [], [])
        if reader in ready:
            os.read(reader, 4096)
        if 0 in ready and not os.read(0, 4096):
            return True
    return False


def kill_all(child: subprocess.Popen[bytes]) -> None:
    """Kill everything below us until nothing is left; without /proc, the process group of the command."""
    if not Path("/proc/self/stat").exists():
        if child.poll() is None:
            child.kill()
        return
    until = time.monotonic() + GRACE
    while (alive := descendants(os.getpid())) and time.monotonic() < until:
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:  # those that we adopted
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == child.pid:
                    child.returncode = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)


def descendants(root: int) -> list[int]:
    """Every process below `root`; of zombies only its own children."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            state, parent = (entry / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[:2]
            if state not in "ZX" or int(parent) == root:
                parents[int(entry.name)] = int(parent)
    below = {root}
    found: list[int] = []
    while more := [pid for pid, parent in parents.items() if parent in below and pid not in below]:
        below.update(more)
        found += more
    return found


if __name__ == "__main__":
    code = main(sys.argv[1], sys.argv[2:])
    sys.exit(code if code >= 0 else 128 - code)
