"""The run that modules written for miles find without being handed it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from miles_core.rollout.state import RolloutState

if TYPE_CHECKING:
    import aiohttp

_running: list[RolloutState] = []


@contextmanager
def running(state: RolloutState | None) -> Iterator[None]:
    """Have `state` found while this is open."""
    if state is None:
        yield
        return
    _running.append(state)
    try:
        yield
    finally:
        _running.remove(state)


def state_of(args: Any) -> RolloutState:
    """The running state whose settings are `args`, else a new one of them."""
    return next((state for state in reversed(_running) if state.args is args), None) or RolloutState(args)


def shared_client() -> aiohttp.ClientSession | None:
    """The HTTP client of the run, while it lasts."""
    return _running[-1].http if _running else None
