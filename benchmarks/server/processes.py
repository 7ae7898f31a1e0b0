"""The processes that are measured: starting and stopping them, their CPU time and memory as the system counts them."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
_ALL_THREADS = 2
"""Linux' number of the clock that counts what all threads of a process ran (`clock_getcpuclockid`)."""
START_SECONDS = 120
STOP_SECONDS = 120


@dataclass(frozen=True)
class Served:
    """A server that runs: where, and its process. How long it took until it answered: the whole, and computing it."""

    url: str
    pid: int
    started: float
    computed: float = 0.0

    @property
    def starting(self) -> float:
        """Seconds from its start to its first answer, less those in which it waited for the processor."""
        return min(self.started, self.computed)

    @property
    def pids(self) -> list[int]:
        """Its process and those that it started."""
        found, waiting = [], [self.pid]
        while waiting:
            pid = waiting.pop()
            found.append(pid)
            for task in Path(f"/proc/{pid}/task").iterdir():
                with suppress(FileNotFoundError):  # a thread that has just ended
                    waiting += map(int, (task / "children").read_text().split())
        return found

    def cpu(self) -> float:
        """Seconds of CPU used so far."""
        return sum(_cpu(pid) for pid in self.pids)

    def memory(self) -> float:
        """Resident megabytes."""
        return sum(_resident(pid) for pid in self.pids)


def _cpu(pid: int) -> float:
    """What `/proc/PID/stat` gives in hundredths of a second, to the nanosecond: the clock of the process."""
    return time.clock_gettime((~pid << 3) | _ALL_THREADS)


def _resident(pid: int) -> float:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def free_port() -> int:
    """A port that nothing listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: Sequence[str], port: int) -> Iterator[Served]:
    """A server process until the end of the block; it must answer `/health` with anything but a refusal."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        while not _answers(url):
            if process.poll() is not None or time.perf_counter() - began > START_SECONDS:
                raise SystemExit(f"{' '.join(command)} did not start")
            time.sleep(0.02)
        yield Served(url, process.pid, time.perf_counter() - began, _cpu(process.pid))
    finally:
        process.terminate()
        process.wait(STOP_SECONDS)


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/health", timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


class Bench:
    """Starts what a measurement needs, of one tokenizer; all of it ends with the block."""

    def __init__(self, tokenizer: Path) -> None:
        self.tokenizer = tokenizer
        self._stack = ExitStack()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, command: Sequence[str], port: int) -> Served:
        return self._stack.enter_context(running(command, port))

    def engine(self, *, sampled: int = 64, delay: float = 0.0) -> str:
        """The URL of a new mock engine."""
        port = free_port()
        arguments = [str(port), str(self.tokenizer), str(sampled), str(delay)]
        return self._start([sys.executable, str(HERE / "mock_engine.py"), *arguments], port).url

    def floor(self, engine: str) -> Served:
        """A new floor in front of an engine."""
        port = free_port()
        return self._start([sys.executable, str(HERE / "floor.py"), str(port), engine], port)

    def server(self, *engines: str, flags: Sequence[str] = ()) -> Served:
        """A new session server in front of engines."""
        port = free_port()
        chosen = [word for engine in engines for word in ("--engine", engine)]
        command = [sys.executable, "-m", "miles_core", "serve", "--port", str(port), "--tito-model", "qwen3"]
        return self._start([*command, "--checkpoint", str(self.tokenizer), *chosen, *flags], port)
