"""Wait for an engine where none answers: a rollout that failed meanwhile was not the rollout's fault."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING

from miles_core.errors import EngineError, EnginesGone
from miles_core.rollout import http

if TYPE_CHECKING:
    import aiohttp

    from miles_core.rollout.state import RolloutState

log = logging.getLogger(__name__)

BETWEEN = 1.0
"""Seconds between two looks at engines that do not answer."""


class Outage:
    """What a run does while no engine answers; `patience` is how many seconds it waits for one."""

    def __init__(self, state: RolloutState, patience: float) -> None:
        self._state, self._patience = state, patience
        self._look: asyncio.Task[bool] | None = None
        self._over = float("-inf")
        """When the last outage that was seen ended."""

    async def was(self, since: float) -> bool:
        """Whether there was a time since then, by `time.monotonic`, when no engine answered; returns when one does.

        All rollouts that ask during an outage wait together. Raises EnginesGone.
        """
        if since < self._over:
            return True
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(self._wait())
        return await asyncio.shield(self._look)

    async def close(self) -> None:
        """Stop waiting; the run is over."""
        if self._look is not None:
            self._look.cancel()
            await asyncio.gather(self._look, return_exceptions=True)

    async def _wait(self) -> bool:
        if await engines_answer(self._state):
            return False
        began = time.monotonic()
        log.warning("no engine answers: waiting up to %g s (--engine-wait) for one", self._patience)
        while (left := began + self._patience - time.monotonic()) > 0:
            await asyncio.sleep(min(BETWEEN, left))
            if await engines_answer(self._state):
                self._over = time.monotonic()
                seconds = self._over - began
                log.warning("an engine answers again after %.0f s: what failed meanwhile begins anew", seconds)
                return True
        raise EnginesGone(
            f"no engine has answered for {self._patience:g} s (--engine-wait): {_where(self._state)}\n"
            "  start one; the same command does what is left, and what failed because of it"
        )


def _where(state: RolloutState) -> str:
    return ", ".join(state.engines.urls) if state.engines else f"those behind {state.args.session_server_url}"


async def engines_answer(state: RolloutState) -> bool:
    """Whether an engine answers, asked directly or through the session server; where nobody can tell, one does."""
    if state.engines is not None:
        return await state.engines.answer()
    if not state.args.session_server_url:
        return True
    key = state.args.session_api_key
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with http.client(None) as client:
        return await http.is_up(_behind_a_session(client, f"{state.args.session_server_url}/sessions", headers))


async def _behind_a_session(client: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> None:
    """Ask for the health of a session's engine. Raises EngineError."""
    made = await http.once(client, "post", url, {}, headers)
    if not isinstance(made, dict) or "session_id" not in made:
        return
    own = f"{url}/{made['session_id']}"
    try:
        await http.once(client, "get", f"{own}/health", None, headers)
    finally:
        with contextlib.suppress(EngineError):
            await http.once(client, "delete", own, None, headers)
