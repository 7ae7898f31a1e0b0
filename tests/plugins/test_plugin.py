"""Calling a loaded plugin: its exceptions name it, ours pass."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest

from miles_core.errors import PluginContractError, SampleError
from miles_core.plugins import Plugin, PluginRecord


def plugin(pick: Callable[..., Any]) -> Plugin:
    record = PluginRecord("sample-hook", "p", "zz-a", "1.0", "zz_a")
    return Plugin(record, {"pick_samples": pick}, types.ModuleType("zz_a"), None)


def raising(error: BaseException) -> Callable[..., Any]:
    def pick() -> None:
        raise error

    return pick


@pytest.mark.parametrize("error", [ValueError("too few"), SystemExit("too few")])
def test_what_a_hook_raises_names_plugin_and_hook(error: BaseException) -> None:
    with pytest.raises(PluginContractError) as caught:
        plugin(raising(error)).call("pick_samples")
    place = f"({__file__}, line {raising.__code__.co_firstlineno + 2})"
    message = f"sample-hook p of zz-a 1.0 failed in pick_samples: {type(error).__name__}: too few {place}"
    assert caught.value.message == message
    assert caught.value.__cause__ is error


def test_our_own_errors_pass_through() -> None:
    error = SampleError("no samples")
    with pytest.raises(SampleError) as caught:
        plugin(raising(error)).call("pick_samples")
    assert caught.value is error
    assert caught.value.__cause__ is None


def test_ctrl_c_passes_through() -> None:
    with pytest.raises(KeyboardInterrupt):
        plugin(raising(KeyboardInterrupt())).call("pick_samples")


def test_guard_does_the_same_for_code_around_a_hook() -> None:
    with (
        pytest.raises(PluginContractError, match="failed in run_agent: KeyError: 'x'"),
        plugin(print).guard("run_agent"),
    ):
        raise KeyError("x")


def test_a_hook_that_is_not_there_says_which_are() -> None:
    with pytest.raises(PluginContractError) as caught:
        plugin(print).hook("postprocess_samples")
    assert caught.value.message == "sample-hook p of zz-a 1.0 has no postprocess_samples; it has pick_samples"
