"""Ids of tool calls in the form that a template takes: some refuse any but their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from miles_core.errors import MilesError
from miles_core.testing.verify.trajectories import TRAJECTORIES, Trajectory
from miles_core.tito import BoundFamily
from miles_core.types import Message


def with_accepted_ids(bound: BoundFamily, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
    """The trajectories as they are, or with ids of nine letters and digits where the template takes only those."""
    tried = next(one for one in TRAJECTORIES if "calls" in one.needs)
    other = _shortened(tried)
    if _takes(bound, tried) or not _takes(bound, other):
        return trajectories
    return [_shortened(one) for one in trajectories]


def _takes(bound: BoundFamily, trajectory: Trajectory) -> bool:
    try:
        bound.render(trajectory.messages, list(trajectory.tools) or None, None, True)
    except MilesError:
        return False
    except Exception:  # a family's own code; the trajectories will say so
        return True
    return True


def _shortened(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, messages=tuple(map(_with_short_ids, trajectory.messages)))


def _with_short_ids(message: Message) -> Message:
    changed: dict[str, Any] = dict(message)
    if message.get("tool_calls"):
        changed["tool_calls"] = [{**call, "id": _short(call["id"])} for call in message["tool_calls"]]
    if message.get("tool_call_id"):
        changed["tool_call_id"] = _short(message["tool_call_id"])
    return changed


def _short(call_id: str) -> str:
    """The number at the end of an id, as nine letters and digits."""
    return f"call{int(call_id.rpartition(':')[2]):05d}"
