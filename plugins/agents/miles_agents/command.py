"""An agent that is any program: it finds the model's address in its environment, and leaves its result in a file.

The program is started once per sample, in a process group of its own, which is killed when its time is up, when the
rollout is cancelled or aborted, and when the program has ended and left others behind. Beside the environment of the
rollout it has:

- `OPENAI_BASE_URL`, `OPENAI_API_KEY`: the session, for any OpenAI client;
- `MILES_PROMPT_FILE`, `MILES_METADATA_FILE`, `MILES_REQUEST_KWARGS_FILE`: files with the messages, the sample's
  metadata and the sampling parameters, as JSON; the same text in `MILES_PROMPT`, `MILES_METADATA` and
  `MILES_REQUEST_KWARGS` where it is short enough for a variable;
- `MILES_RESULT_FILE`: where it may leave a JSON object, merged into the sample's metadata; `reward` is its reward.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import shutil
import signal
import tempfile
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_agents.chat import key_of
from miles_core.errors import ConfigError
from miles_core.types import Message

GRACE = 2.0
"""Seconds between asking a program to stop and killing it."""

LONGEST_VARIABLE = 100_000
"""Bytes; Linux refuses to start a program with a variable of more than 128 KiB."""

NO_PROGRAM = "the agent command needs a program: give --command 'PROGRAM ARGUMENTS'"

SHOWN = 2000
"""Characters of the end of stderr that an error shows."""


class CommandAgent:
    """Runs `command` for every sample; made without arguments as a plugin."""

    def __init__(self, command: Sequence[str] = (), *, timeout: float | None = None) -> None:
        self.command = list(command)
        self.timeout = timeout
        self._running: set[Process] = set()

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Which program, and how long it may take."""
        parser.add_argument("--command", metavar="WORDS", help="The program and its arguments, as one shell word list.")
        parser.add_argument(
            "--command-timeout", type=float, metavar="SECONDS", help="Time limit of one run of the program."
        )

    def configure_agent(self, args: Any) -> None:
        """Read the flags. Raises ConfigError if there is no such program."""
        try:
            self.command = shlex.split(args.command or "")
        except ValueError as error:
            raise ConfigError(f"--command {args.command}: {error}") from error
        if not self.command:
            raise ConfigError(NO_PROGRAM)
        if shutil.which(self.command[0]) is None:
            raise ConfigError(
                f"--command {args.command}: there is no program {self.command[0]!r}, or it may not be run"
            )
        self.timeout = args.command_timeout
        if self.timeout is not None and self.timeout <= 0:
            raise ConfigError(f"--command-timeout {self.timeout:g}: expected more than 0")

    async def run_agent(
        self,
        base_url: str,
        prompt: list[Message],
        request_kwargs: dict[str, Any],
        metadata: dict[str, Any],
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Run the program; gives what it left, with `agent_error` where it failed or took too long."""
        if not self.command:
            raise ConfigError(NO_PROGRAM)
        with tempfile.TemporaryDirectory(prefix="miles-command-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            given = {"prompt": prompt, "metadata": metadata, "request_kwargs": request_kwargs}
            environment = {
                **{name: value for name, value in os.environ.items() if name != "MILES_API_KEY"},
                **write_inputs(folder, given),
                "OPENAI_BASE_URL": f"{base_url}/v1",
                "OPENAI_API_KEY": key_of(kwargs, metadata),
            }
            fault = await self._run(folder, environment)
            return read_result(folder / "result.json", fault)

    async def abort(self, args: Any) -> None:
        """Kill every program that still runs."""
        await asyncio.gather(*(stop(process) for process in list(self._running)))

    async def _run(self, folder: Path, environment: Mapping[str, str]) -> str | None:
        """Run the program to its end; what went wrong, in words."""
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
            process = await asyncio.create_subprocess_exec(
                *self.command, stdin=DEVNULL, stdout=out, stderr=err, env=environment, start_new_session=True
            )
        self._running.add(process)
        try:
            async with asyncio.timeout(self.timeout):
                code = await process.wait()
        except TimeoutError:
            return f"{self.command[0]} was not finished within {self.timeout:g} s (--command-timeout)"
        finally:
            await stop(process)
            self._running.discard(process)
        if code == 0:
            return None
        how = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
        said = (folder / "stderr").read_text("utf-8", "replace").strip()[-SHOWN:]
        return f"{self.command[0]} {how}" + (f": {said}" if said else "")


def write_inputs(folder: Path, given: Mapping[str, Any]) -> dict[str, str]:
    """Write each value as a JSON file; the variables that name the files, and hold what is short."""
    variables = {"MILES_RESULT_FILE": str(folder / "result.json")}
    for name, value in given.items():
        text = json.dumps(value, ensure_ascii=True)
        path = folder / f"{name}.json"
        path.write_text(text, encoding="utf-8")
        variables[f"MILES_{name.upper()}_FILE"] = str(path)
        if len(text) <= LONGEST_VARIABLE:
            variables[f"MILES_{name.upper()}"] = text
    return variables


def read_result(path: Path, fault: str | None) -> dict[str, Any]:
    """The object that the program left, none if there is no file, and what went wrong as `agent_error`."""
    result: dict[str, Any] = {}
    try:
        text = path.read_text(encoding="utf-8").strip()
        value = json.loads(text) if text else {}
        if not isinstance(value, dict):
            raise ValueError(f"it is a {type(value).__name__}")
        result = value
    except FileNotFoundError:
        pass
    except (OSError, ValueError, RecursionError) as error:
        fault = fault or f"the result in MILES_RESULT_FILE is no JSON object: {error}"
    return {**result, "agent_error": fault} if fault else result


async def stop(process: Process) -> None:
    """End the program and whatever it left behind: first asked, then killed."""
    if process.returncode is None:
        _signal(process, signal.SIGTERM)
        try:
            async with asyncio.timeout(GRACE):
                await process.wait()
        except TimeoutError:
            pass
    _signal(process, signal.SIGKILL)
    await process.wait()


def _signal(process: Process, number: signal.Signals) -> None:
    """To the whole group, which has the process's id; it is empty where everything has ended."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        pass
