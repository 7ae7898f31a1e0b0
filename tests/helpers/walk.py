"""Following a page of the documentation: its commands are run, its files written, its servers started, in order."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import yaml

from helpers.pages import ROOT, Block

BIN = Path(sys.executable).parent

# A reader installs from the index and builds here; a test has neither network nor time for it, so that what is asked
# for is checked instead: the extras that a command names exist, and so do the targets of the Makefile.
PIP = """#!{python}
import re, sys, tomllib
from pathlib import Path
known = tomllib.loads(Path({root!r}, "pyproject.toml").read_text())["project"]["optional-dependencies"]
for asked in sys.argv[2:]:
    for extra in re.findall(r"\\w+", (re.findall(r"(?:miles-plugins|[.])\\[([^\\]]*)\\]", asked) or [""])[0]):
        if extra not in known:
            sys.exit(f"there is no extra {{extra}}")
"""
MAKE = '#!/bin/sh\nexec /usr/bin/make --directory {root} --dry-run "$@" >/dev/null\n'
PYTEST = '#!/bin/sh\nexec {python} -m pytest -q -p no:cacheprovider "$@"\n'
# Making an environment is mostly installing pip into it, and pip is the one above.
PYTHON3 = """#!/bin/sh
case "$*" in "-m venv "*) set -- "$@" --without-pip ;; esac
exec {python} "$@"
"""
PROGRAMS = {"pip": PIP, "make": MAKE, "pytest": PYTEST, "python3": PYTHON3}

ENGINE = "miles-plugins engine --engine local --model examples/tiny/model --tito-model qwen3 --port"
"""The command that starts the tiny model's engine; its port follows."""

SERVERS = ("miles-plugins serve", "miles-plugins engine")
"""Commands that go on while the rest of the page is followed."""


@dataclass(frozen=True)
class Stage:
    """What a page takes for granted.

    `files` lie in the reader's folder, `before` are commands that were run, `stands_for` words of commands with what a
    reader would put there, `servers` beginnings of commands that run until they are stopped, beside ours, `path` where
    programs are looked up, `ready` what a server says that listens nowhere; `prepare` is given the folder. Commands
    that start the tiny model's engine do so where the page `starts_engines`; else they get one that runs already.
    """

    files: Mapping[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()
    stands_for: Mapping[str, str] = field(default_factory=dict)
    servers: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    path: tuple[Path, ...] = (BIN,)
    ready: str = ""
    prepare: Callable[[Path], object] | None = None
    starts_engines: bool = False


class Walk:
    """A reader's folder; a context manager that stops what was started in it.

    Numbers of ports stand for free ones, the same throughout. `engine` is the port of a running engine of the tiny
    model, which the page's commands use where they would start one each.
    """

    def __init__(self, folder: Path, stage: Stage, engine: str | None = None) -> None:
        self.folder = folder
        self.stage = stage
        self._engine = None if stage.starts_engines else engine
        self._ports: dict[str, str] = {}
        self._started: list[tuple[Block, subprocess.Popen[str], Path]] = []
        (folder / "examples").symlink_to(ROOT / "examples")
        (folder / "bin").mkdir()
        for name, text in PROGRAMS.items():
            program = folder / "bin" / name
            program.write_text(text.format(python=sys.executable, root=str(ROOT)), encoding="utf-8")
            program.chmod(0o755)
        for name, text in stage.files.items():
            self._write(name, text)
        if stage.prepare is not None:
            stage.prepare(folder)

    def __enter__(self) -> Walk:
        for number, command in enumerate(self.stage.before):
            self.follow(Block("before", number, "bash", "", command))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        ends = []
        for block, process, log in reversed(self._started):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
            try:
                ends.append((block, process.wait(60), log))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                ends.append((block, process.wait(), log))
        if error is None:
            for block, code, log in ends:
                assert code in (0, 130, -signal.SIGINT), f"{block} ended with {code}\n{log.read_text()}"

    def port(self, number: str) -> str:
        """The port that a number in the page's commands stood for."""
        return self._ports[number]

    def follow(self, block: Block) -> None:
        """Do what the reader does with a block. Raises AssertionError where it does not work."""
        text = block.text
        if block.language == "bash":
            for word, meaning in self.stage.stands_for.items():
                text = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", meaning, text)
            if self._engine is not None:
                text = self._with_running_engine(text, self._engine)
        text = self._free_ports(text)
        match block.language:
            case "bash":
                for number, part in enumerate(self._parts(text)):
                    self._run(block, part, number)
            case "python" if not block.title:
                self._run(block, self._script(block, text))
            case "python":
                compile(text, block.title, "exec")
            case "pyi":
                compile(text, str(block), "exec")
            case "json":
                json.loads(text)
            case "jsonl":
                assert [json.loads(line) for line in text.splitlines()]
            case "toml":
                tomllib.loads(text)
            case "yaml":
                assert yaml.safe_load(text) is not None
            case "text" | "jinja":
                pass
            case other:
                raise AssertionError(f"{block} is {other or 'in no language'}: nothing checks such a block")
        if block.title:
            self._write(block.title, text)

    def _write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def _script(self, block: Block, text: str) -> str:
        name = f"line_{block.line}.py"
        self._write(name, text)
        return f"python {name}"

    def _with_running_engine(self, text: str, port: str) -> str:
        """A block without the command that starts the engine, and its others with the URL of the running one."""
        self._ports.update(dict.fromkeys((port, *re.findall(rf"^{ENGINE} (\d+)$", text, re.MULTILINE)), port))
        text = re.sub(rf"^{ENGINE} \d+$", "", text, flags=re.MULTILINE)
        text = text.replace("--engine local", f"--engine http://127.0.0.1:{port}")
        return text.replace("--model examples/tiny/model", "--checkpoint examples/tiny/model")

    def _free_ports(self, text: str) -> str:
        def free(found: re.Match[str]) -> str:
            if found[2] not in self._ports:
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", 0))
                    self._ports[found[2]] = str(probe.getsockname()[1])
            return found[1] + self._ports[found[2]]

        return re.sub(r"((?:127\.0\.0\.1|localhost|0\.0\.0\.0):|--port[ =])(\d{4,5})\b", free, text)

    def _parts(self, text: str) -> list[str]:
        """A block's commands, one by one where a server is among them; else all at once."""
        commands = [line for line in re.sub(r"\\\n\s*", "", text).splitlines() if line.strip() and line[0] != "#"]
        return commands if any(map(self._serves, commands)) else [text]

    def _serves(self, command: str) -> bool:
        return re.sub(r"^([A-Z_]+=\S+ )+", "", command).startswith((*SERVERS, *self.stage.servers))

    def _run(self, block: Block, text: str, number: int = 0) -> None:
        log = self.folder / f"line_{block.line}_{number}.log"
        with log.open("w") as out:
            process = subprocess.Popen(
                ["bash", "-eu", "-o", "pipefail", "-c", text],
                cwd=self.folder, env=self._environ(), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                text=True, start_new_session=True,
            )  # fmt: skip
        self._started.append((block, process, log))
        if self._serves(text):
            self._wait_until_it_serves(block, process, log, text)
            return
        try:
            code = process.wait(240)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"{block} does not end:\n{text}\n{log.read_text()}") from None
        assert code == 0, f"{block} ends with {code}:\n{text}\n{log.read_text()}"
        self._started.pop()

    def _wait_until_it_serves(self, block: Block, process: subprocess.Popen[str], log: Path, text: str) -> None:
        """Until a port that it names, on its command line or in what it prints, is answered, or it says it is ready."""
        until = time.monotonic() + 120
        while True:
            assert process.poll() is None, f"{block} ends with {process.returncode}:\n{text}\n{log.read_text()}"
            assert time.monotonic() < until, f"{block} does not serve:\n{text}\n{log.read_text()}"
            said = log.read_text()
            named = re.findall(r"--port[ =](\d+)", text) or re.findall(r"^http://[\w.]+:(\d+)$", said, re.MULTILINE)
            if (named and _answers(int(named[-1]))) or (self.stage.ready and self.stage.ready in said):
                return
            time.sleep(0.05)

    def _environ(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("MILES_", "PYTHON", "OPENAI_", "CI"))}
        path = ":".join(map(str, (self.folder / "bin", *self.stage.path, "/usr/bin", "/bin")))
        return {
            **kept, "PATH": path, "HOME": str(self.folder), "PYTHONPATH": str(self.folder), "TMPDIR": str(self.folder),
            "PYTHONDONTWRITEBYTECODE": "1", **self.stage.environ,
        }  # fmt: skip


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
