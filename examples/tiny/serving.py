"""The built-in engine with a session server in front of it, and rollouts of the weights it has."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from miles_core import Engine, EngineConfig, MilesError, Sample
from miles_core.plugins import Plugin, Registry
from miles_core.rollout.job import RunOptions
from miles_core.rollout.state import RolloutArgs, RolloutState
from miles_core.rollout.stream import rollouts
from miles_core.server.app import ServerThread
from miles_core.server.settings import ServerSettings

FAMILY = "qwen3"
CONCURRENCY = 128
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 160}
"""The distribution whose log-probs the trainer computes: nothing but the model's own."""

UPDATE_TIMEOUT = 60.0
"""Seconds."""


class Refused(MilesError):
    """The engine did not take the weights."""


@dataclass(frozen=True)
class Serving:
    """Where rollouts are done."""

    engine: Engine
    server: ServerThread
    agent: Plugin

    def sample(self, prompts: Sequence[dict[str, Any]], samples: int) -> list[Sample]:
        """`samples` rollouts of every prompt, in their order."""
        args = RolloutArgs(session_server_url=self.server.url, session_server_instance_id=self.server.instance_id)
        state = RolloutState(args, agent=self.agent, sampling_params=dict(SAMPLING))
        options = RunOptions(samples_per_prompt=samples, concurrency=CONCURRENCY)
        return asyncio.run(_collect(prompts, state, options))

    def load(self, model: Path, version: str) -> None:
        """Have the engine serve the weights of a folder, as version `version`, as one asks SGLang to."""
        body = {"model_path": str(model.resolve()), "weight_version": version}
        for url in self.engine.urls:
            _post(f"{url}/update_weights_from_disk", body)


def reward_of(sample: Sample) -> float:
    """The sample's reward, a number."""
    if not isinstance(sample.reward, int | float):
        reason = sample.metadata.get("agent_error") or "the agent gave none"
        raise MilesError(f"sample {sample.index} has reward {sample.reward!r}, not a number: {reason}")
    return float(sample.reward)


@contextmanager
def serving(model: Path, version: str, seed: int) -> Iterator[Serving]:
    """An engine with the weights of a folder, as version `version`, and a session server, while the block runs.

    The seed is the engine's: which request gets which draw still depends on the order in which they come.
    """
    registry = Registry.discover()
    config = EngineConfig(
        model=str(model),
        checkpoint=str(model),
        tito_model=FAMILY,
        options=("--weight-version", version, "--max-batch", str(CONCURRENCY), "--seed", str(seed)),
    )
    engine: Engine = registry.load("engine", "local").call("launch_engine", config)
    try:
        settings = ServerSettings(checkpoint=str(model), tito_model=FAMILY, engine_urls=tuple(engine.urls))
        with ServerThread(settings, registry) as server:
            yield Serving(engine, server, registry.load("agent", "calculator"))
    finally:
        engine.close()


async def _collect(prompts: Sequence[dict[str, Any]], state: RolloutState, options: RunOptions) -> list[Sample]:
    async with aclosing(rollouts(prompts, "agentic", state, options=options)) as samples:
        return sorted([sample async for sample in samples], key=lambda sample: sample.index or 0)


def _post(url: str, body: dict[str, Any]) -> None:
    """Raise Refused with the engine's own words if it says no."""
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=UPDATE_TIMEOUT) as reply:
            answer = json.load(reply)
    except HTTPError as error:
        raise Refused(f"{url} answered {error.code}: {error.read().decode(errors='replace')}") from error
    except OSError as error:
        raise Refused(f"{url} does not answer: {error}") from error
    if not answer.get("success"):
        raise Refused(f"{url}: {answer.get('message')}")
