"""Runs inside every process of an SGLang that we started, before it serves: calls the plugins' `configure_sglang`.

SGLang calls `start` because `bridge.py` puts a copy of this file on its PYTHONPATH, with an entry point. Whatever goes
wrong ends the process: SGLang would only log it, and serve without what the plugin registers. Nothing but the
standard library is imported here, since SGLang's environment may have none of our packages; those it lacks are lent.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

FAILED = 70
"""Exit code of a process whose plugins could not be run."""


class Lent(importlib.abc.MetaPathFinder):
    """Finds top-level packages of the launcher's environment, and nothing else that is there.

    `places` says in which directory each lies.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = places

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        place = self._places.get(fullname) if path is None else None
        return importlib.machinery.PathFinder.find_spec(fullname, [place]) if place else None


def start() -> None:
    """Call every plugin's `configure_sglang`, and note that it was done."""
    here = Path(__file__).parent
    plan = json.loads((here / "plan.json").read_text("utf-8"))
    # plugins must be the launcher's own; of what they need, SGLang's environment goes first
    sys.meta_path.insert(0, Lent(plan["own"]))
    sys.meta_path.append(Lent(plan["needed"]))
    try:
        arguments = server_args(plan["arguments"])
        if arguments is None:
            return
        module = importlib.import_module(plan["module"])
        module.configure(plan["plugins"], arguments)
    except BaseException as error:
        traceback.print_exc()
        note(here, getattr(error, "message", "") or f"{type(error).__name__}: {error}")
        os._exit(FAILED)
    note(here, None)


def server_args(words: Sequence[str]) -> argparse.Namespace | None:
    """SGLang's flags as given, with its defaults; None if they are wrong, which SGLang itself says best."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    for action in parser._actions:
        if action.dest in ("tool_call_parser", "reasoning_parser"):
            action.choices = None  # which there are is up to the plugins
    if "--config" in words:
        from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

        words = ConfigArgumentMerger(parser).merge_config_with_args(list(words))
    try:
        return parser.parse_args(list(words))
    except (argparse.ArgumentError, SystemExit):
        return None


def note(here: Path, error: str | None) -> None:
    """Tell the launcher that this process has run the plugins, or why not."""
    text: dict[str, Any] = {"pid": os.getpid(), "error": error}
    unfinished = here / "ran" / f".{os.getpid()}"
    unfinished.write_text(json.dumps(text), "utf-8")
    unfinished.rename(here / "ran" / f"{os.getpid()}.json")
