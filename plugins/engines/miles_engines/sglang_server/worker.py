"""One SGLang server: started, asked whether it serves, and stopped with everything it started."""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from miles_core.errors import EngineStartError, MilesError, PluginContractError
from miles_engines.sglang_server import keeper
from miles_engines.sglang_server.bridge import Bridge

LOG_LINES = 30
"""How much of the end of the log an error shows."""

LONGEST_LINE = 300
_TAIL_BYTES = 65536
_LINE_BYTES = 4096
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""It is on this machine: no proxy."""


class State(enum.Enum):
    """Where a worker is between being started and being given up."""

    STOPPED = "stopped"
    STARTING = "starting"
    SERVING = "serving"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a worker is started: the command, what its environment has on top, its log and its address."""

    name: str
    command: Sequence[str]
    environ: Mapping[str, str]
    log: Path
    host: str
    port: int
    patience: float
    """Seconds that starting may take without a word in the log."""

    @property
    def url(self) -> str:
        """The base URL, as this machine reaches it."""
        host = self.host
        reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        return f"http://{reachable}:{self.port}"


class Worker:
    """A server and its keeper; `look` moves it on, and raises why it does not serve."""

    def __init__(self, recipe: Recipe, bridge: Bridge | None) -> None:
        self.recipe = recipe
        self.state = State.STOPPED
        self.since = 0.0
        """When the present state began, on the monotonic clock."""
        self._bridge = bridge
        self._keeper: subprocess.Popen[bytes] | None = None
        self._log_size = -1
        self._heard = 0.0
        self._begins_at = 0

    def start(self) -> None:
        """Start the server. Raises EngineStartError if its address is taken or its log cannot be written."""
        recipe = self.recipe
        check_free(recipe.host, recipe.port)
        if self._bridge is not None:
            self._bridge.forget()
        try:
            recipe.log.parent.mkdir(parents=True, exist_ok=True)
            log = recipe.log.open("ab")
        except OSError as error:
            raise EngineStartError(f"cannot write the engine's log {recipe.log}: {error.strerror}") from error
        folder = str(self._bridge.folder) if self._bridge is not None else ""
        with log:
            self._begins_at = log.tell()
            self._keeper = subprocess.Popen(
                [sys.executable, "-S", "-E", keeper.__file__, folder, *recipe.command],
                stdin=subprocess.PIPE,  # closed with this process, however it ends: the keeper then stops the tree
                stdout=log,
                stderr=log,
                # Ctrl-C in the terminal reaches us alone, and we close it in order
                start_new_session=True,
                env={**os.environ, **recipe.environ},
            )
        self._enter(State.STARTING)
        self._log_size, self._heard = -1, self.since

    def look(self) -> None:
        """See what has become of it.

        Raises EngineStartError if it has ended, or says nothing for too long; PluginContractError if a plugin of it
        failed. It is stopped then.
        """
        if self.state is State.STOPPED:
            return
        try:
            self._check_notes()
            self._check_lives()
            if self.state is State.STARTING:
                self._check_speaks()
                if self._is_healthy():
                    self._check_all_configured()
                    self._enter(State.SERVING)
        except MilesError:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the whole tree; may be called twice."""
        keeper_, self._keeper = self._keeper, None
        if keeper_ is not None:
            with contextlib.suppress(ProcessLookupError):
                keeper_.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                keeper_.wait(2 * keeper.GRACE + 2)
            if keeper_.stdin is not None:
                keeper_.stdin.close()
            if keeper_.poll() is None:
                keeper_.kill()
                keeper_.wait()
        self._enter(State.STOPPED)

    def close(self) -> None:
        """Stop it for good."""
        self.stop()
        if self._bridge is not None:
            self._bridge.close()

    def last_line(self) -> str:
        """What the log says last."""
        lines = self._lines(_LINE_BYTES)
        return lines[-1][:LONGEST_LINE] if lines else ""

    def processes(self) -> list[int]:
        """Ids of SGLang's processes: the server and what it named after its part."""
        return [] if self._keeper is None else sglang_processes(self._keeper.pid)

    def _enter(self, state: State) -> None:
        self.state, self.since = state, time.monotonic()

    def _check_notes(self) -> None:
        for note in self._bridge.notes() if self._bridge is not None else ():
            if note.error is not None:
                raise PluginContractError(
                    f"{note.error}\n  in process {note.pid} of SGLang; its log: {self.recipe.log}"
                )

    def _check_lives(self) -> None:
        code = self._keeper.poll() if self._keeper is not None else 0
        if code is not None:
            self._check_notes()  # it may have left one on the way out
            how = "ended before it served" if self.state is State.STARTING else "died"
            raise self._failed(f"{how} ({exit_text(code)})")

    def _check_speaks(self) -> None:
        """Loading may take long; a log that no longer grows means that it hangs."""
        with contextlib.suppress(OSError):
            size = self.recipe.log.stat().st_size
            if size != self._log_size:
                self._log_size, self._heard = size, time.monotonic()
        if time.monotonic() - self._heard > self.recipe.patience:
            raise self._failed(f"did not start: nothing new in its log for {self.recipe.patience:g} s")

    def _is_healthy(self) -> bool:
        try:
            with _OPENER.open(f"{self.recipe.url}/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError, ValueError):
            return False

    def _check_all_configured(self) -> None:
        """Every process of SGLang must have run the plugins: SGLang itself does not mind if one has not."""
        if self._bridge is None:
            return
        missing = set(self.processes()) - {note.pid for note in self._bridge.notes()}
        if missing:
            raise self._failed(
                f"did not run configure_sglang of its plugins in {len(missing)} of its processes "
                f"({', '.join(map(str, sorted(missing)))}); SGLang 0.5.23 or newer does"
            )

    def _failed(self, what: str) -> EngineStartError:
        tail = "\n".join(self._lines(_TAIL_BYTES)[-LOG_LINES:])
        end = f"\nThe end of {self.recipe.log}:\n{tail}" if tail else f"\nIts log, {self.recipe.log}, is empty."
        return EngineStartError(f"engine {self.recipe.name} {what}{end}")

    def _lines(self, size: int) -> list[str]:
        """The last lines of this start's part of the log; a progress bar counts as it shows."""
        try:
            with self.recipe.log.open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self._begins_at, end - size))
                text = log.read().decode("utf-8", "replace")
        except OSError:
            return []
        lines = (line.rstrip("\r").rpartition("\r")[2].strip() for line in text.split("\n"))
        return [line for line in lines if line]


def check_free(host: str, port: int) -> None:
    """Raise EngineStartError if a port is taken: another server would answer in this one's place."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as SGLang does
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:  # OverflowError: no such port
            reason = getattr(error, "strerror", None) or error
            raise EngineStartError(f"engine sglang cannot listen on {host}:{port}: {reason}") from error


def free_port(host: str) -> int:
    """A port that nobody listens on now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def exit_text(code: int) -> str:
    """An exit code in words: the keeper hands a signal on as 128 and its number, as shells do."""
    number = -code if code < 0 else code - 128
    if number not in {member.value for member in signal.Signals}:
        return f"exit code {code}"
    hint = "; out of memory?" if number == signal.SIGKILL else ""
    return f"{signal.Signals(number).name}{hint}"


def sglang_processes(keeper_pid: int) -> list[int]:
    """Ids of SGLang's own processes below a keeper: the server, and those that it named `sglang::…` after their part.

    Others of the tree (compilers, multiprocessing's helpers) load no plugins.
    """
    found = []
    for pid in keeper.descendants(keeper_pid):
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            if line.startswith(b"sglang::") or b"\0sglang.launch_server\0" in line:
                found.append(pid)
    return found
