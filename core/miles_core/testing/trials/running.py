"""What trials share: running asynchronous hooks from checks that may be inside pytest's event loop, and settings."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from miles_core.errors import MilesError
from miles_core.plugins import Plugin
from miles_core.plugins.importing import said
from miles_core.rollout.state import RolloutArgs

Result = TypeVar("Result")


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work` to its end in a thread and an event loop of its own."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def settings(plugin: Plugin, given: Mapping[str, Any], **ours: Any) -> RolloutArgs:
    """A run's settings: the plugin's flags with their defaults, what the trial gives over them, and `ours`."""
    flags: dict[str, Any] = {}
    if plugin.has("add_arguments"):
        parser = argparse.ArgumentParser(exit_on_error=False)
        plugin.call("add_arguments", parser)
        flags = vars(parser.parse_args([]))
    args = RolloutArgs()
    for name, value in {**ours, **flags, **given}.items():
        setattr(args, name, value)
    return args


def raised(error: BaseException, plugin: Plugin) -> str:
    """What a plugin raised, in words; one of our errors speaks for itself."""
    if isinstance(error, MilesError):
        return error.message.replace("\n", " ")
    return f"it raised {said(error, plugin.module.__name__)}"
