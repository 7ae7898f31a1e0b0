"""The built-in engine (`--engine local`): a `transformers` model served with SGLang's requests and answers.

Runs on the CPU, or on a GPU if torch has one. The server is a process of its own
(`miles_engines.local_server`); this module starts it, waits until it answers, and stops it. Imports of
torch happen there alone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO

from miles_core import hookimpl
from miles_core.engine.base import Engine, EngineConfig
from miles_core.errors import EngineStartError

NEEDED = ("torch", "transformers")
LOG_LINES = 20
"""How much of the end of the log an error shows."""

GRACE = 5.0
"""Seconds between asking the server to stop and killing it."""


@hookimpl
def launch_engine(config: EngineConfig) -> Engine:
    """Start the server and wait until it answers `/health`."""
    _check(config)
    engine = LocalEngine(config)
    try:
        engine.start()
    except BaseException:
        engine.close()
        raise
    return engine


class LocalEngine:
    """A server process of ours. It ends when closed, and by itself when this process ends."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._log, self._log_path, self._log_is_ours = _open_log(config.log_file)
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    @property
    def urls(self) -> tuple[str, ...]:
        """The one server's base URL."""
        host = self._config.host
        reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        return (f"http://{reachable}:{self._port}",)

    @property
    def pid(self) -> int | None:
        """The server's process id, once started."""
        return self._process.pid if self._process else None

    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process and wait for its word, and for `/health`. Raises EngineStartError."""
        deadline = time.monotonic() + self._config.start_timeout
        reader, writer = os.pipe()
        with open(reader, "rb", buffering=0) as status:
            try:
                self._process = self._spawn(writer)
            finally:
                os.close(writer)
            self._port = self._await_ready(status, deadline)
        self._await_health(deadline)

    def _spawn(self, status_fd: int) -> subprocess.Popen[bytes]:
        config = self._config
        own = ["--model", config.model, "--checkpoint", config.checkpoint, "--tito-model", config.tito_model]
        own += ["--host", config.host, "--port", str(config.port)]
        own += ["--status-fd", str(status_fd), "--exit-with-stdin"]
        return subprocess.Popen(
            [sys.executable, "-m", "miles_engines.local_server", *own, *config.options],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(status_fd,),
            # its own group: Ctrl-C in the terminal reaches us alone, and we close it in order
            start_new_session=True,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", **config.environment},
        )

    def _await_ready(self, status: IO[bytes], deadline: float) -> int:
        """Pass progress on until the server names its port; an error line or its end raises."""
        rest = b""
        while True:
            if not _readable(status, deadline - time.monotonic()):
                raise self._failed(f"did not start within {self._config.start_timeout:g} s")
            data = status.read(65536)
            if not data:
                raise self._failed("ended before it served" + self._exit_text())
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                kind, _, text = line.decode("utf-8", "replace").partition(" ")
                if kind == "ready":
                    return int(text)
                if kind == "error":
                    raise self._failed(f"did not start: {text}")
                if self._config.progress is not None:
                    self._config.progress(text)

    def _await_health(self, deadline: float) -> None:
        url = self.urls[0] + "/health"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine
        while True:
            try:
                with opener.open(url, timeout=max(0.1, deadline - time.monotonic())):
                    return
            except (urllib.error.URLError, OSError) as error:
                if not self.alive() or time.monotonic() > deadline:
                    raise self._failed(f"does not answer {url}: {error}") from error

    def _exit_text(self) -> str:
        if self._process is None:
            return ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE)
        code = self._process.returncode
        if code is None:
            return ""
        hint = "; out of memory?" if code == -signal.SIGKILL else ""
        return f" (exit code {code}{hint})"

    def _failed(self, what: str) -> EngineStartError:
        tail = _tail(self._log_path)
        where = "" if self._log_is_ours else f" of {self._log_path}"
        log = f"\nThe end{where or ' of its log'}:\n{tail}" if tail else ""
        return EngineStartError(f"engine local ({self._config.model}) {what}{log}")

    def close(self) -> None:
        """Ask the process group to stop, then kill it; may be called twice."""
        process = self._process
        if process is not None:
            self._stop(process)
            if process.stdin is not None:
                process.stdin.close()
        self._log.close()
        if self._log_is_ours:
            self._log_path.unlink(missing_ok=True)

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is not None:
                break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)


def _check(config: EngineConfig) -> None:
    """What can be known to fail before a process is started."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise EngineStartError(
            f"engine local needs {' and '.join(missing)}, which this Python ({sys.executable}) does not have: "
            "pip install 'miles-plugins[local]'"
        )
    for flag, given, file in (("--model", config.model, "config.json"), ("--checkpoint", config.checkpoint, "")):
        _check_directory(flag, given, file)


def _check_directory(flag: str, given: str, file: str) -> None:
    path = Path(given)
    if not path.is_dir():
        what = "is a file, not a directory" if path.exists() else "does not exist"
        raise EngineStartError(
            f"{flag} {given}: {what}; engine local reads models from disk. "
            f"Download one first, e.g.: hf download Qwen/Qwen3-0.6B --local-dir {path.name or 'DIR'}"
        )
    if not os.access(path, os.R_OK | os.X_OK):
        raise EngineStartError(f"{flag} {given}: the directory cannot be read; check its permissions")
    if file and not (path / file).is_file():
        raise EngineStartError(f"{flag} {given}: has no {file}; is it the directory of a transformers model?")


def _open_log(path: Path | None) -> tuple[IO[bytes], Path, bool]:
    """The log to append to, where it is, and whether it is a temporary file of ours."""
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return path.open("ab"), path, False
        except OSError as error:
            raise EngineStartError(f"cannot write the engine's log {path}: {error.strerror}") from error
    handle, name = tempfile.mkstemp(prefix="miles-engine-local-", suffix=".log")
    return os.fdopen(handle, "ab"), Path(name), True


def _readable(pipe: IO[bytes], timeout: float) -> bool:
    """Whether there is something to read, or the other end has closed, within `timeout` seconds."""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        return bool(selector.select(max(0.0, timeout)))


def _tail(path: Path) -> str:
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-LOG_LINES:])
