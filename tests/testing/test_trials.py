"""Trying agents, generate functions and engines out: what is seen when one breaks its contract."""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from miles_core import EngineConfig, GenerateFnInput, GenerateFnOutput, Sample
from miles_core.errors import ConfigError, EngineStartError
from miles_core.plugins import Plugin, PluginRecord
from miles_core.plugins.signatures import adapted
from miles_core.testing import AgentTrial, EngineTrial, FakeEngine, GeneratorTrial, conformance
from miles_core.testing.fake_sessions import call, say
from miles_core.types import SampleStatus


def checks(kind: str, trial: object = None, **hooks: Callable[..., Any]) -> dict[str, tuple[str, str | None]]:
    record = PluginRecord(kind, "p", "zz-a", "1.0", "zz_a")
    plugin = Plugin(record, hooks, types.ModuleType(__name__), None)
    return {c.name: (c.outcome.value, c.reason) for c in conformance.run(plugin, trial=trial).checks}


# -- agents ---------------------------------------------------------------------------------------------------


async def turn(base_url: str, messages: list[Any], **fields: Any) -> dict[str, Any]:
    """One turn; the answer's message."""
    body = {"model": "m", "messages": messages, **fields}
    async with aiohttp.ClientSession() as http, http.post(f"{base_url}/v1/chat/completions", json=body) as response:
        reply = await response.json()
    message: dict[str, Any] = reply["choices"][0]["message"]
    return message


async def good(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any) -> dict[str, Any]:
    answer = await turn(base_url, prompt, **request_kwargs)
    again = [*prompt, answer, {"role": "user", "content": "Sure?"}]
    await turn(base_url, again, **request_kwargs)
    return {"reward": 1.0}


def test_an_agent_that_keeps_its_contract() -> None:
    found = checks("agent", run_agent=good)
    assert [found.pop(name)[0] for name in ("can be stopped", "registers its flags")] == ["skip", "skip"]
    assert {outcome for outcome, _ in found.values()} == {"pass"}


@pytest.mark.parametrize(
    ("kind", "hook", "check", "returned"),
    [
        ("agent", "run_agent", "works in its session", "None"),
        ("generator", "generate", "gives whole samples", "a GenerateFnOutput"),
    ],
)
def test_what_cannot_be_awaited_is_no_matter_of_the_task(kind: str, hook: str, check: str, returned: str) -> None:
    def run_agent(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any) -> None: ...

    def generate(input: GenerateFnInput) -> GenerateFnOutput:
        return GenerateFnOutput(input.sample)

    found = checks(kind, **{hook: adapted(hook, run_agent if kind == "agent" else generate)})
    outcome, reason = found[check]
    assert (outcome, f"{hook} returned {returned}, which cannot be awaited" in str(reason)) == ("fail", True)


def test_an_agent_that_drops_reasoning_or_changes_calls_loses_turns() -> None:
    async def forgets(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any) -> None:
        answer = await turn(base_url, prompt, **request_kwargs)
        kept = {"role": "assistant", "content": answer["content"]}
        await turn(base_url, [*prompt, kept, {"role": "user", "content": "Sure?"}], **request_kwargs)

    outcome, reason = checks("agent", run_agent=forgets)["sends answers back as they came"]
    assert (outcome, reason) == (
        "fail",
        "it sent an answer back with another reasoning_content: None, which was 'One and two are three.'",
    )
    trial = AgentTrial(answers=[call("add", '{"a":1}'), say("3")])
    outcome, reason = checks("agent", trial, run_agent=forgets)["sends answers back as they came"]
    assert outcome == "fail"
    assert reason is not None
    assert reason.startswith("it sent an answer back with another tool_calls: None, which was [{'id': 'call_0'")


def test_an_agent_without_the_sampling_parameters() -> None:
    async def hot(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any) -> None:
        await turn(base_url, prompt, **{**request_kwargs, "temperature": 2})

    outcome, reason = checks("agent", run_agent=hot)["sends the sampling parameters"]
    assert outcome == "fail"
    assert reason is not None
    assert reason.endswith("its request has {'temperature': 2}; pass them on with extra_body")


def test_an_agent_that_keeps_one_client_for_all_its_rollouts() -> None:
    first: list[str] = []

    async def shares(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any) -> None:
        first.append(base_url)
        await turn(first[0], prompt, **request_kwargs)

    outcome, reason = checks("agent", run_agent=shares)["works in its session"]
    assert (outcome, reason) == (
        "fail",
        "of 2 rollouts at once, one sent no request to its own session: is a client shared?",
    )


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ([1.0], "run_agent returned list; return a dict or None"),
        ({"reward": float("nan")}, "run_agent returned what is not JSON (Out of range float values are not JSON"),
        ({"file": Path("/x")}, "run_agent returned what is not JSON (Object of type PosixPath is not JSON serializ"),
    ],
)
def test_what_an_agent_returns_must_fit_into_metadata(returned: Any, text: str) -> None:
    async def returns(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any) -> Any:
        await turn(base_url, prompt, **request_kwargs)
        return returned

    outcome, reason = checks("agent", run_agent=returns)["returns metadata"]
    assert outcome == "fail"
    assert reason is not None
    assert reason.startswith(text)


def test_an_agent_that_needs_more_than_the_kits_task_is_skipped_and_on_its_own_fails() -> None:
    async def needs(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any) -> None:
        raise LookupError(metadata.get("repo"))

    async def idles(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any) -> None:
        await asyncio.sleep(60)

    for agent, text in ((needs, "it raised LookupError: "), (idles, "it did not end within 0.1 s")):
        trial = AgentTrial(metadata={"repo": "x"}, timeout=0.1)
        outcome, reason = checks("agent", trial, run_agent=agent)["works in its session"]
        assert outcome == "fail"
        assert reason is not None
        assert reason.startswith(text)
    outcome, reason = checks("agent", run_agent=needs)["works in its session"]
    assert outcome == "skip"
    assert reason is not None
    assert reason.endswith("; give it a task of its own: conforms(…, trial=AgentTrial(prompt=…, answers=…))")


def test_an_agent_is_configured_with_its_flags_before_it_runs() -> None:
    seen: list[Any] = []

    def configure_agent(args: Any) -> None:
        seen.append((args.tries, args.image))
        if args.image is None:
            raise ConfigError("give --image\n  such as --image busybox")

    def add_arguments(parser: Any) -> None:
        parser.add_argument("--tries", type=int, default=3)
        parser.add_argument("--image")

    hooks = {"run_agent": good, "configure_agent": configure_agent, "add_arguments": add_arguments}
    outcome, reason = checks("agent", **hooks)["works in its session"]
    assert outcome == "skip"
    assert reason is not None
    assert reason.startswith("give --image   such as --image busybox; give it a task of its own: ")
    given = checks("agent", AgentTrial(args={"image": "x"}), **hooks)
    assert given["works in its session"] == ("pass", None)
    assert seen == [(3, None), (3, "x")]


async def test_trials_run_inside_an_event_loop_too() -> None:
    assert checks("agent", run_agent=good)["works in its session"][0] == "pass"


# -- generate functions ---------------------------------------------------------------------------------------


def finished(sample: Sample, **changes: Any) -> Sample:
    sample.tokens, sample.response_length, sample.status = [1, 2, 3], 2, SampleStatus.COMPLETED
    sample.loss_mask, sample.rollout_log_probs = [1, 0], [-0.5, 0.0]
    for name, value in changes.items():
        setattr(sample, name, value)
    return sample


def generator(change: Callable[[GenerateFnInput], Any], trial: Any = None) -> dict[str, tuple[str, str | None]]:
    async def generate(input: GenerateFnInput) -> Any:
        return change(input)

    return checks("generator", trial, generate=generate)


def test_a_generate_function_that_keeps_its_contract() -> None:
    found = generator(lambda input: GenerateFnOutput(finished(input.sample)))
    assert found.pop("registers its flags")[0] == "skip"
    assert {outcome for outcome, _ in found.values()} == {"pass"}


def test_the_engine_and_flags_are_in_args() -> None:
    async def generate(input: GenerateFnInput) -> Any:
        url = f"http://{input.args.sglang_router_ip}:{input.args.sglang_router_port}/generate"
        body = {"input_ids": [1], "sampling_params": {}}
        async with aiohttp.ClientSession() as http, http.post(url, json=body) as response:
            reply = await response.json()
        entries = reply["meta_info"]["output_token_logprobs"]
        assert reply["output_ids"] == [entry[1] for entry in entries]
        assert reply["text"] == "Fine.<|im_end|>"
        assert (input.args.tries, input.args.more) == (3, "x")
        return finished(input.sample)

    found = checks(
        "generator",
        GeneratorTrial(args={"more": "x"}),
        generate=generate,
        add_arguments=lambda parser: parser.add_argument("--tries", type=int, default=3),
    )
    assert {outcome for outcome, _ in found.values()} == {"pass"}


@pytest.mark.parametrize(
    ("change", "check", "reason"),
    [
        (
            lambda input: finished(input.sample, loss_mask=[1]),
            "gives whole samples",
            "ValueError: loss_mask has 1 entries, response_length is 2",
        ),
        (
            lambda input: finished(input.sample, status=SampleStatus.PENDING),
            "gives whole samples",
            "a sample's status is pending; set what became of it",
        ),
        (
            lambda input: finished(input.sample, rollout_log_probs=[float("-inf"), 0.0]),
            "gives whole samples",
            "a token that is trained has no finite log-probability",
        ),
        (lambda input: [], "gives whole samples", "generate function "),
        (
            lambda input: finished(Sample(index=3, label="3")),
            "keeps the sample's own",
            "a sample has lost what it came with (index 3, label '3', metadata {'from': …}): index 3, label '3', met",
        ),
        (
            lambda input: input.sampling_params.pop("top_p") and finished(input.sample),
            "leaves what is shared",
            "it changed the run's sampling_params to {'temperature': 0.7, 'max_new_tokens': 64}; copy them first",
        ),
    ],
)
def test_a_generate_function_that_breaks_its_contract(change: Any, check: str, reason: str) -> None:
    outcome, found = generator(change)[check]
    assert outcome == "fail"
    assert found is not None
    assert found.startswith(reason)


def test_a_session_that_is_left_behind_is_told() -> None:
    async def generate(input: GenerateFnInput) -> Any:
        async with input.state.http.post(f"{input.args.session_server_url}/sessions", json={}):
            return finished(input.sample)

    assert checks("generator", generate=generate)["deletes its sessions"] == (
        "fail",
        "it left 1 session(s) behind; delete them",
    )


def test_a_generate_function_that_needs_more_is_skipped() -> None:
    def needs(input: GenerateFnInput) -> Any:
        raise AttributeError("no reward model")

    outcome, reason = generator(needs)["gives whole samples"]
    assert outcome == "skip"
    assert reason is not None
    assert "give it a task of its own" in reason
    assert generator(needs, GeneratorTrial())["gives whole samples"][0] == "fail"


# -- engines --------------------------------------------------------------------------------------------------


class Handle:
    """An engine that is the fake one."""

    def __init__(self, *, slash: str = "", stubborn: bool = False, reply: Any = None) -> None:
        self.fake = FakeEngine()
        if reply is not None:
            self.fake.always = lambda body: self.fake.says("Hi").with_json(reply)
        self.fake.start()
        self._slash, self._stubborn, self._open = slash, stubborn, True

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.fake.url + self._slash,)

    def alive(self) -> bool:
        return self._open or self._stubborn

    def close(self) -> None:
        self._open = False
        if not self._stubborn:
            self.fake.stop()


TRIAL = EngineTrial(config=EngineConfig(model="m", checkpoint="m", tito_model="f"))


@pytest.fixture
def handles() -> Iterator[list[Handle]]:
    made: list[Handle] = []
    yield made
    for handle in made:
        handle.fake.stop()


def engine(handles: list[Handle], **how: Any) -> dict[str, tuple[str, str | None]]:
    def launch_engine(config: EngineConfig) -> Handle:
        handles.append(Handle(**how))
        return handles[-1]

    return checks("engine", TRIAL, launch_engine=launch_engine)


def test_an_engine_that_keeps_its_contract(handles: list[Handle]) -> None:
    found = engine(handles)
    assert found.pop("configures SGLang")[0] == "skip"
    assert {outcome for outcome, _ in found.values()} == {"pass"}
    assert handles[0].fake.turns[0]["input_ids"] == [1, 2, 3]


def test_urls_have_no_slash(handles: list[Handle]) -> None:
    outcome, reason = engine(handles, slash="/")["starts"]
    assert outcome == "fail"
    assert reason is not None
    assert reason.endswith("give URLs without a trailing slash")


def test_an_engine_that_stays(handles: list[Handle]) -> None:
    assert engine(handles, stubborn=True)["stops"] == ("fail", "alive() is still True after close()")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda reply: reply["choices"][0].pop("meta_info"),
            "its answer lacks 'meta_info': a turn needs choices[0].message.content and .meta_info",
        ),
        (
            lambda reply: reply["choices"][0]["meta_info"].update(completion_tokens=9),
            "it sent 3 output_token_logprobs for completion_tokens=9",
        ),
        (
            lambda reply: reply["choices"][0]["message"].update(content=None),
            "choices[0].message.content is None, not text",
        ),
    ],
)
def test_an_answer_that_lacks_what_a_turn_needs(handles: list[Handle], change: Any, reason: str) -> None:
    assert engine(handles, reply=change)["takes a turn"] == ("fail", reason)


def test_an_engine_that_does_not_start_says_why() -> None:
    def launch_engine(config: EngineConfig) -> Any:
        raise EngineStartError(f"engine p: no GPU\nThe end of its log:\n{sys.platform}")

    found = checks("engine", TRIAL, launch_engine=launch_engine)
    assert found["starts"] == ("fail", f"engine p: no GPU\nThe end of its log:\n{sys.platform}")
    assert found["takes a turn"] == ("skip", "it was not started, see above")


def test_without_a_model_an_engine_is_not_started() -> None:
    outcome, reason = checks("engine", launch_engine=lambda config: None)["starts"]
    assert outcome == "skip"
    assert reason == "starting it takes a model: conforms(…, trial=EngineTrial(config=EngineConfig(…)))"
