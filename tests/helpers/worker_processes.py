"""A session server in the foreground, as a process of its own with others below it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from helpers.sessions import Talk

SCRIPT = """
import json, signal, sys
from miles_core.plugins import Registry
from miles_core.server.run import serve
from miles_core.server.settings import ServerSettings
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: sys.exit(0))
given = json.loads(sys.argv[1])
settings = ServerSettings(**{**given, "engine_urls": tuple(given["engine_urls"])})
serve(settings, Registry.discover(), lambda parts, url: print(url, flush=True))
"""
PATIENCE = 60.0


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for something that comes by itself."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@dataclass
class Running:
    """A server that runs."""

    process: subprocess.Popen[str]
    url: str
    errors: IO[str]

    @property
    def said(self) -> str:
        """What it wrote on standard error so far."""
        self.errors.seek(0)
        return self.errors.read()

    @property
    def pids(self) -> list[int]:
        """Its processes, without the one above them."""
        pid = self.process.pid
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def talks(self, count: int, **settings: Any) -> list[Talk]:
        """A session in each of so many processes, in their order."""
        found: dict[str, Talk] = {}
        while len(found) < count:
            talk = Talk(self.url, **settings)
            found.setdefault(talk.id[:2], talk)
        return [talk for _, talk in sorted(found.items())]

    def wait_until_up(self, count: int, key: str | None = None) -> None:
        """Wait until each of so many processes has been given a session."""
        if count > 1:
            seen: set[str] = set()
            while len(seen) < count:
                talk = Talk(self.url, key=key)
                seen.add(talk.id[:2])
                talk.delete()

    def pid_of(self, talk: Talk) -> int:
        """The process that has a session, as long as none was started again: they are started in their order."""
        return self.pids[int(talk.id[:2], 16)]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Stop it, and wait for its exit code."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)


@contextmanager
def running(folder: Path, *, code: str = "", wait: bool = True, **settings: Any) -> Iterator[Running]:
    """A server with these settings until the end of the block; what it says goes to a file in the folder.

    `code` runs in it first; `wait` until all its processes serve.
    """
    with open(folder / f"errors-{time.monotonic_ns()}", "w+") as errors:
        command = [sys.executable, "-c", code + SCRIPT, json.dumps(settings)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            server = Running(process, url, errors)
            if wait:
                server.wait_until_up(settings.get("workers", 1), settings.get("api_key"))
            yield server
        finally:
            process.kill()
            process.communicate()


def connected(url: str) -> socket.socket:
    """A connection to a server."""
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname or "", parts.port or 0), timeout=PATIENCE)
