"""Trying an agent out: two rollouts of one task at once, against a session server that answers from a script."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from miles_core.errors import MilesError, PluginLoadError
from miles_core.plugins import Plugin
from miles_core.testing.conformance.report import CheckAnswer, Skip
from miles_core.testing.fake_sessions import INSTANCE, Answer, FakeSession, FakeSessions, say, serving
from miles_core.testing.trials.running import raised, run, settings
from miles_core.types import Message

SAMPLING: Mapping[str, Any] = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "max_tokens": 64, "seed": 7}
"""The `request_kwargs` of a trial."""

ROLLOUTS = 2
OWN_TASK = "give it a task of its own: conforms(…, trial=AgentTrial(prompt=…, answers=…))"


@dataclass(frozen=True, kw_only=True)
class AgentTrial:
    """A task for an agent, and what the model says to it, turn by turn (the last answer over and over)."""

    prompt: Sequence[Message] = ({"role": "user", "content": "What is 1 + 2?"},)
    answers: Sequence[Answer] = field(
        default_factory=lambda: [say("The answer is 3.", reasoning="One and two are three.")]
    )
    metadata: Mapping[str, Any] = field(default_factory=lambda: {"label": "3"})
    args: Mapping[str, Any] = field(default_factory=dict)
    """Values of the agent's own flags, for `configure_agent`, over their defaults."""
    timeout: float = 30.0
    """Seconds that it may take."""


@dataclass(kw_only=True)
class Played:
    """What came of a trial: each rollout's session, and what it returned or raised."""

    trial: AgentTrial
    given: bool
    """Whether the trial is the author's, and not the kit's."""
    sessions: list[FakeSession]
    returned: list[Any]
    errors: list[str]

    def excused(self, reason: str) -> CheckAnswer:
        """A failure on the author's own task; on the kit's, the agent may need more than that has."""
        return reason if self.given else Skip(f"{reason}; {OWN_TASK}")


def play(plugin: Plugin, trial: AgentTrial | None) -> Played:
    """Configure the agent, as a run does, and run it."""
    if plugin.has("configure_agent"):
        try:
            plugin.call("configure_agent", settings(plugin, trial.args if trial else {}))
        except MilesError as error:
            given, errors = trial is not None, [raised(error, plugin)]
            return Played(trial=trial or AgentTrial(), given=given, sessions=[], returned=[], errors=errors)
    return run(_play(plugin, trial or AgentTrial(), given=trial is not None))


async def _play(plugin: Plugin, trial: AgentTrial, *, given: bool) -> Played:
    fake = FakeSessions(trial.answers)
    async with serving(fake) as url, aiohttp.ClientSession() as http:
        try:
            results = await asyncio.gather(*(_rollout(plugin, trial, http, url) for _ in range(ROLLOUTS)))
        except PluginLoadError as error:  # no fault of the task
            return Played(trial=trial, given=True, sessions=[], returned=[], errors=[raised(error, plugin)])
    return Played(
        trial=trial,
        given=given,
        sessions=list(fake.sessions.values()),
        returned=[returned for returned, error in results if error is None],
        errors=[error for _, error in results if error is not None],
    )


async def _rollout(plugin: Plugin, trial: AgentTrial, http: aiohttp.ClientSession, url: str) -> tuple[Any, str | None]:
    """What the agent returned, or in words how it failed."""
    async with http.post(f"{url}/sessions") as response:
        session = await response.json()
    metadata = {
        **copy.deepcopy(dict(trial.metadata)),
        "session_server_id": url.removeprefix("http://"),
        "session_server_instance_id": INSTANCE,
    }
    call = plugin.hook("run_agent")(
        base_url=session["base_url"],
        prompt=copy.deepcopy(list(trial.prompt)),
        request_kwargs=dict(SAMPLING),
        metadata=metadata,
    )
    try:
        return await asyncio.wait_for(call, trial.timeout), None
    except TimeoutError:
        return None, f"it did not end within {trial.timeout:g} s"
    except PluginLoadError:
        raise
    except (Exception, SystemExit) as error:
        return None, raised(error, plugin)


def works_in_its_session(played: Played) -> CheckAnswer:
    """Every rollout sends its turns to the session it was given, and ends."""
    if played.errors:
        return played.excused(played.errors[0])
    turns = [len(session.requests) for session in played.sessions]
    if not any(turns):
        return played.excused("it sent no request to <base_url>/v1/chat/completions")
    if not all(turns):
        return f"of {len(turns)} rollouts at once, one sent no request to its own session: is a client shared?"
    return None


def returns_metadata(played: Played) -> CheckAnswer:
    """What it returns is None, or a dict that can be written as JSON, as samples are."""
    if not played.returned:
        return Skip("it returned nothing, see above")
    for returned in played.returned:
        if returned is not None and not isinstance(returned, dict):
            return f"run_agent returned {type(returned).__name__}; return a dict or None"
        try:
            json.dumps(returned, allow_nan=False)
        except (TypeError, ValueError) as error:
            return f"run_agent returned what is not JSON ({error}): {returned!r}"
    return None


def sends_the_sampling_parameters(played: Played) -> CheckAnswer:
    """Each session's first request has all of `request_kwargs`, under their names."""
    firsts = [session.requests[0] for session in played.sessions if session.requests]
    if not firsts:
        return Skip("it sent no request, see above")
    for request in firsts:
        changed = [key for key, value in SAMPLING.items() if request.get(key) != value]
        if changed:
            sent = {key: request.get(key) for key in changed}
            return f"of request_kwargs {dict(SAMPLING)}, its request has {sent}; pass them on with extra_body"
    return None


def sends_answers_back_as_they_came(played: Played) -> CheckAnswer:
    """An answer in a later request is the one that was given, reasoning and calls included."""
    later = [(session, request) for session in played.sessions for request in session.requests[1:]]
    if not later:
        return Skip("it made one request, or none")
    before = sum(message["role"] == "assistant" for message in played.trial.prompt)
    for session, request in later:
        sent = [message for message in request["messages"] if message.get("role") == "assistant"][before:]
        for answer, message in zip(session.messages, sent, strict=False):
            lost = [key for key in ("content", "reasoning_content", "tool_calls") if not _same(key, answer, message)]
            if lost:
                was, now = answer.get(lost[0]), message.get(lost[0])
                return f"it sent an answer back with another {lost[0]}: {now!r}, which was {was!r}"
    return None


def _same(key: str, answer: Message, message: Message) -> bool:
    """Whether the matcher `strict` sees no difference."""
    was, now = (_plain(one.get(key)) for one in (answer, message))
    return bool(was == now)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        value = [{k: v for k, v in call.items() if k != "index"} if isinstance(call, dict) else call for call in value]
    return value or None


CHECKS: Mapping[str, Callable[[Played], CheckAnswer]] = {
    "works in its session": works_in_its_session,
    "returns metadata": returns_metadata,
    "sends the sampling parameters": sends_the_sampling_parameters,
    "sends answers back as they came": sends_answers_back_as_they_came,
}
OPTIONAL = frozenset({"sends answers back as they came"})
