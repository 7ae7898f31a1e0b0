"""Trying a generate function out: one sample, with a session server and an engine that answer from a script."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from miles_core.errors import PluginContractError, PluginLoadError
from miles_core.plugins import Plugin
from miles_core.rollout.engines import Engines
from miles_core.rollout.loader import load_generate_function
from miles_core.rollout.state import RolloutState
from miles_core.testing.conformance.report import CheckAnswer, Skip
from miles_core.testing.fake_engine import FakeEngine, fake_engine
from miles_core.testing.fake_sessions import Answer, FakeSessions, say, serving
from miles_core.testing.trials.running import raised, run, settings
from miles_core.types import GenerateFnInput, Message, Sample, SampleStatus

SAMPLING: Mapping[str, Any] = {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 64}
ENDED = frozenset(SampleStatus) - {SampleStatus.PENDING}
OWN_TASK = "give it a task of its own: conforms(…, trial=GeneratorTrial(prompt=…, args=…))"


@dataclass(frozen=True, kw_only=True)
class GeneratorTrial:
    """A prompt for a generate function, what the model answers in a session, and `args` beside those of a run.

    The generate function finds the fake session server in `args.session_server_url`, the fake engine in
    `args.sglang_router_ip` and `args.sglang_router_port` and in `state.engines`, and its own flags with their defaults.
    """

    prompt: Sequence[Message] = ({"role": "user", "content": "What is 1 + 2?"},)
    answers: Sequence[Answer] = field(default_factory=lambda: [say("The answer is 3.")])
    args: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 30.0
    """Seconds that it may take."""


@dataclass(kw_only=True)
class Played:
    """What came of a trial: the samples, or in words why there are none; and what is shared between samples."""

    given: bool
    samples: list[Sample] = field(default_factory=list)
    broke: str | None = None
    """A fault of the contract."""
    raised: str | None = None
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    sessions_left: int = 0


class _Agent:
    """Stands for the run's agent: one turn."""

    def has(self, hook: str) -> bool:
        """It has nothing to abort."""
        return hook == "run_agent"

    def hook(self, hook: str) -> Callable[..., Any]:
        """Its only hook."""
        return self._run

    async def _run(
        self, base_url: str, prompt: list[Message], request_kwargs: dict[str, Any], metadata: dict[str, Any]
    ) -> None:
        body = {"model": "default", "messages": prompt, **request_kwargs}
        async with aiohttp.ClientSession() as http, http.post(f"{base_url}/v1/chat/completions", json=body) as reply:
            reply.raise_for_status()


def play(plugin: Plugin, trial: GeneratorTrial | None) -> Played:
    """Run the generate function on one sample."""
    with fake_engine() as engine:
        return run(_play(plugin, trial or GeneratorTrial(), engine, given=trial is not None))


async def _play(plugin: Plugin, trial: GeneratorTrial, engine: FakeEngine, *, given: bool) -> Played:
    fake = FakeSessions(trial.answers)
    played = Played(given=given, sampling_params=dict(SAMPLING))
    async with serving(fake) as url, aiohttp.ClientSession() as http:
        where = urlsplit(engine.url)
        router = {"sglang_router_ip": where.hostname, "sglang_router_port": where.port}
        state = RolloutState(
            settings(plugin, trial.args, session_server_url=url, **router),
            agent=_Agent(),
            sampling_params=dict(SAMPLING),
            http=http,
            family=engine.family,
            engines=Engines([engine.url]),
        )
        sample = Sample(index=3, prompt=copy.deepcopy(list(trial.prompt)), label="3", metadata={"from": "the kit"})
        played.sampling_params = state.sampling_params
        try:
            call = load_generate_function(plugin)(GenerateFnInput(state, sample, state.sampling_params))
            played.samples = (await asyncio.wait_for(call, trial.timeout)).as_list()
        except (PluginContractError, PluginLoadError) as error:
            played.broke = error.message.replace("\n", " ")
        except TimeoutError:
            played.raised = f"it did not end within {trial.timeout:g} s"
        except (Exception, SystemExit) as error:
            played.raised = raised(error, plugin)
    played.sessions_left = len(fake.sessions.keys() - set(fake.deleted))
    return played


def gives_whole_samples(played: Played) -> CheckAnswer:
    """It gives samples that have ended, whose per-token fields agree, with log-probabilities of what is trained."""
    if played.broke is not None:
        return played.broke
    if played.raised is not None:
        return played.raised if played.given else Skip(f"{played.raised}; {OWN_TASK}")
    for sample in played.samples:
        sample.validate()
        if sample.status not in ENDED:
            return f"a sample's status is {sample.status}; set what became of it"
        if sample.status is SampleStatus.COMPLETED and not sample.response_length:
            return "a completed sample has no response"
        values = sample.rollout_log_probs or []
        if any(on and not math.isfinite(value) for on, value in zip(sample.loss_mask or [], values, strict=False)):
            return "a token that is trained has no finite log-probability"
    return None


def keeps_the_samples_own(played: Played) -> CheckAnswer:
    """Index, label and metadata that the sample came with are still there: they say what it belongs to."""
    if not played.samples:
        return Skip("it gave no sample, see above")
    for sample in played.samples:
        if (sample.index, sample.label, sample.metadata.get("from")) != (3, "3", "the kit"):
            found = f"index {sample.index}, label {sample.label!r}, metadata {sample.metadata}"
            return f"a sample has lost what it came with (index 3, label '3', metadata {{'from': …}}): {found}"
    return None


def leaves_what_is_shared(played: Played) -> CheckAnswer:
    """The sampling parameters are those of every sample of the run."""
    if dict(played.sampling_params) != dict(SAMPLING):
        return f"it changed the run's sampling_params to {dict(played.sampling_params)}; copy them first"
    return None


def deletes_its_sessions(played: Played) -> CheckAnswer:
    """Sessions that it created are deleted, or the server would keep them."""
    return f"it left {played.sessions_left} session(s) behind; delete them" if played.sessions_left else None


CHECKS: Mapping[str, Callable[[Played], CheckAnswer]] = {
    "gives whole samples": gives_whole_samples,
    "keeps the sample's own": keeps_the_samples_own,
    "leaves what is shared": leaves_what_is_shared,
    "deletes its sessions": deletes_its_sessions,
}
OPTIONAL: frozenset[str] = frozenset()
