"""Shows that a family, or a bare template, keeps its promises on a set of conversations of our own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles_core.errors import ConfigError, RequestError
from miles_core.testing.verify.bare import bind_bare
from miles_core.testing.verify.call_ids import with_accepted_ids
from miles_core.testing.verify.checks import Way, try_trajectory
from miles_core.testing.verify.results import CHECKS, Finding, Outcome, TokenDifference, Tried, Verification
from miles_core.testing.verify.sampling import writes
from miles_core.testing.verify.trajectories import LOOK_UP, TRAJECTORIES, Trajectory
from miles_core.tito import BoundFamily

__all__ = [
    "CHECKS",
    "LOOK_UP",
    "TRAJECTORIES",
    "Finding",
    "Outcome",
    "TokenDifference",
    "Trajectory",
    "Tried",
    "Verification",
    "bind_bare",
    "verify",
]


def verify(
    bound: BoundFamily,
    *,
    thinking: str = "both",
    kwargs: Mapping[str, Any] | None = None,
    trajectories: Sequence[Trajectory] = TRAJECTORIES,
) -> Verification:
    """Take every trajectory through a family, with thinking `on`, `off` or `both`.

    `kwargs` are template kwargs of every turn. Raises ConfigError if they contradict the family, or if it has no
    switch for the one way of thinking that is asked for.
    """
    formats = frozenset(what for what in ("reasoning", "calls") if writes(bound, what))
    ways, left_out = _ways(bound, thinking, kwargs or {}, "reasoning" in formats)
    ready = with_accepted_ids(bound, trajectories)
    tried = [try_trajectory(bound, trajectory, way, formats) for way in ways for trajectory in ready]
    return Verification(tuple(tried), left_out)


def _ways(
    bound: BoundFamily, thinking: str, kwargs: Mapping[str, Any], reasons: bool
) -> tuple[list[Way], dict[str, str]]:
    """The ways of thinking to try, and why another one is left out."""
    names = bound.family.thinking_kwargs
    try:
        on, off = (bound.merge_kwargs(kwargs, dict.fromkeys(names, value)) for value in (True, False))
    except RequestError as error:
        raise ConfigError(f"--apply-chat-template-kwargs: {error.message}") from error
    if not reasons:
        return [Way(name="none", kwargs=kwargs, reasons=False)], {}
    ways = [Way(name="on", kwargs=on, reasons=True), Way(name="off", kwargs=off, reasons=False)]
    if not _switches(bound, on, off):
        why = f"{bound.template.source} has no switch for thinking"
        if thinking == "off":
            raise ConfigError(f"--thinking off: {why}; leave the flag out")
        return ways[:1], {"off": why}
    return [way for way in ways if thinking in ("both", way.name)], {}


def _switches(bound: BoundFamily, on: Mapping[str, Any], off: Mapping[str, Any]) -> bool:
    """Whether the kwargs that turn thinking off change what is rendered."""
    messages = [{"role": "user", "content": "u"}]
    try:
        return bound.render(messages, None, on) != bound.render(messages, None, off)
    except Exception:  # the trajectories will say why
        return True
