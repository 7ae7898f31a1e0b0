"""The agentic generate function against a scripted session server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from helpers.fake_sessions import INSTANCE, FakeSessions, serving
from miles_agents.calculator import run_agent as calculator
from miles_core.errors import ConfigError
from miles_core.rollout.state import RolloutArgs, RolloutState
from miles_core.types import GenerateFnInput, Message, Sample, SampleStatus
from miles_generators.agentic import SessionServerError, chat_request_kwargs, generate


class Agent:
    """A bound plugin around a function."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run

    def has(self, hook: str) -> bool:
        return hook == "run_agent"

    def hook(self, hook: str) -> Callable[..., Any]:
        return self.run


@pytest.fixture
async def served() -> AsyncIterator[tuple[FakeSessions, RolloutArgs]]:
    fake = FakeSessions()
    async with serving(fake) as url:
        yield fake, RolloutArgs(session_server_url=url, session_server_instance_id=INSTANCE)


Served = tuple[FakeSessions, RolloutArgs]


def ask(args: RolloutArgs, run: Callable[..., Any] = calculator, **params: Any) -> GenerateFnInput:
    prompt: list[Message] = [{"role": "user", "content": "What is 3 * 7?"}]
    sample = Sample(index=5, prompt=prompt, label="21", metadata={"source": "test"})
    return GenerateFnInput(RolloutState(args, agent=Agent(run)), sample, params)


async def one(given: GenerateFnInput) -> Sample:
    output = await generate(given)
    assert isinstance(output.samples, Sample)
    return output.samples


async def test_a_rollout_with_the_calculator(served: Served) -> None:
    fake, args = served
    given = ask(args)
    sample = await one(given)
    sample.validate()
    assert (sample.reward, sample.status, sample.index) == (1.0, SampleStatus.COMPLETED, 5)
    assert sample.loss_mask == [1, 1, 0, 0, 0, 1, 1, 0, 0, 0][: sample.response_length]
    assert sample.metadata["source"] == "test"
    assert sample.metadata["turns"] == 2
    assert sample.metadata["tito_session_mismatch"] == []
    assert sample.non_generation_time == sample.metadata["agent_metrics"]["total_tool_time"]
    assert fake.deleted == list(fake.sessions)
    assert fake.sample_bodies[0]["max_seq_len"] is None
    assert fake.sample_bodies[0]["metadata"]["reward"] == 1.0
    assert given.sample.metadata == {"source": "test"}, "the input is not changed"


async def test_request_kwargs_reach_the_server(served: Served) -> None:
    fake, args = served
    await generate(ask(args, temperature=0.7, max_new_tokens=5, sampling_seed=3, top_k=None, spaces=True))
    sent = next(iter(fake.sessions.values())).requests[0]
    assert (sent["temperature"], sent["max_tokens"], sent["seed"]) == (0.7, 5, 3)
    assert not {"max_new_tokens", "sampling_seed", "top_k", "spaces"} & sent.keys()


@pytest.mark.parametrize(
    ("params", "kwargs"),
    [
        ({"max_new_tokens": 5, "min_new_tokens": 1, "sampling_seed": 2}, {"max_tokens": 5, "min_tokens": 1, "seed": 2}),
        ({"max_new_tokens": 5, "max_tokens": 7}, {"max_tokens": 7}),
        ({"max_new_tokens": 5, "max_tokens": None}, {"max_tokens": 5}),
        ({"model": "m", "messages": [], "input_ids": [1], "rid": "r"}, {}),
        ({"temperature": None, "top_p": 0.0, "stop": []}, {"top_p": 0.0, "stop": []}),
        ({"logprob_start_len": 0, "no_such_thing": 1}, {}),
    ],
)
def test_chat_request_kwargs(params: dict[str, Any], kwargs: dict[str, Any]) -> None:
    assert chat_request_kwargs(params) == kwargs


async def test_the_agent_is_told_where_it_is(served: Served) -> None:
    _, args = served
    args.max_seq_len = 99
    seen: dict[str, Any] = {}

    async def run(**given: Any) -> None:
        seen.update(given)

    await generate(ask(args, run))
    host = args.session_server_url.removeprefix("http://")
    assert seen["metadata"] == {
        "source": "test",
        "label": "21",
        "session_server_id": host,
        "session_server_instance_id": INSTANCE,
        "max_seq_len": 99,
    }
    assert seen["base_url"].startswith(f"http://{host}/sessions/")
    assert seen["prompt"] == [{"role": "user", "content": "What is 3 * 7?"}]


async def test_a_label_in_the_metadata_stays(served: Served) -> None:
    seen: dict[str, Any] = {}

    async def run(metadata: dict[str, Any], **given: Any) -> None:
        seen.update(metadata)

    given = ask(served[1], run)
    given.sample.metadata["label"] = "mine"
    await generate(given)
    assert seen["label"] == "mine"


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit("broken"), asyncio.CancelledError("broken")])
async def test_an_agent_that_raises_keeps_its_turns(
    served: Served, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    async def run(**given: Any) -> dict[str, Any]:
        await calculator(**given)
        raise error

    fake, args = served
    sample = await one(ask(args, run))
    assert "broken" in sample.metadata["agent_error"] or "itself" in sample.metadata["agent_error"]
    assert (sample.response_length > 0, sample.reward) == (True, None)
    assert f"the turns that it took are kept: {sample.metadata['agent_error']}" in caplog.text
    assert fake.deleted == list(fake.sessions)


async def test_the_text_of_a_refusal_is_noted(served: Served) -> None:
    fake, args = served
    fake.script = lambda request: 400
    sample = await one(ask(args))
    assert sample.metadata["agent_error"] == "BadRequestError: Error code: 400: scripted 400"
    assert sample.metadata["empty_reason"] == "no_records"
    assert (sample.status, sample.tokens) == (SampleStatus.ABORTED, [])


@pytest.mark.parametrize("returned", ["text", {"reward": float("nan")}, {"x": object()}])
async def test_a_return_that_is_no_metadata_is_an_agent_error(served: Served, returned: Any) -> None:
    async def run(**given: Any) -> Any:
        await calculator(**given)
        return returned

    sample = await one(ask(served[1], run))
    assert "agent_error" in sample.metadata
    assert sample.response_length > 0


@pytest.mark.parametrize("reward", ["good", [1.0], {"a": "b"}])
async def test_a_reward_of_a_wrong_type_is_named_and_left_out(served: Served, reward: Any) -> None:
    async def run(**given: Any) -> Any:
        return {**await calculator(**given), "reward": reward, "note": 1}

    sample = await one(ask(served[1], run))
    assert (sample.reward, sample.metadata["note"]) == (None, 1)
    assert f"returned the reward {reward!r}" in sample.metadata["agent_error"]
    assert sample.response_length > 0


async def test_a_reward_of_true_is_a_number(served: Served) -> None:
    async def run(**given: Any) -> Any:
        await calculator(**given)
        return {"reward": True}

    reward = (await one(ask(served[1], run))).reward
    assert (reward, type(reward)) == (1.0, float)


async def test_the_agent_cannot_replace_the_servers_keys(served: Served) -> None:
    async def run(**given: Any) -> dict[str, Any]:
        await calculator(**given)
        return {"tito_session_mismatch": "none of your business", "source": "agent"}

    sample = await one(ask(served[1], run))
    assert sample.metadata["tito_session_mismatch"] == []
    assert sample.metadata["source"] == "agent"


async def test_tree_mode_gives_siblings_as_the_server_finished_them(served: Served) -> None:
    fake, args = served
    fake.session_metadata = {"tree": {"nodes": [], "leaves": []}, "agent": {"reward": 1.0}}
    fake.rows = [{"reward": 0.25, "metadata": {"leaf": {"node_id": at}}} for at in (2, 1)]
    output = await generate(ask(args))
    assert isinstance(output.samples, list)
    assert [sample.reward for sample in output.samples] == [0.25, 0.25]
    assert [sample.metadata["leaf"]["node_id"] for sample in output.samples] == [2, 1]
    assert [sample.rollout_id for sample in output.samples] == [5, 5]
    assert "turns" not in output.samples[0].metadata


async def test_a_lost_connection_while_collecting_costs_the_sample(served: Served) -> None:
    fake, args = served
    fake.drop_samples = True
    sample = await one(ask(args))
    assert sample.status is SampleStatus.ABORTED
    assert "collect_error" in sample.metadata
    assert fake.deleted == list(fake.sessions)


@pytest.mark.parametrize("status", [404, 422, 500])
async def test_a_refusal_while_collecting_raises(served: Served, status: int) -> None:
    fake, args = served
    fake.samples_status = status
    with pytest.raises(SessionServerError, match=f"{status}: scripted refusal") as raised:
        await generate(ask(args))
    assert raised.value.status == status
    assert fake.deleted == list(fake.sessions)


async def test_nothing_left_after_cutting_is_truncated(served: Served) -> None:
    fake, args = served
    fake.empty_reason = "all_truncated"
    sample = await one(ask(args))
    assert (sample.status, sample.tokens) == (SampleStatus.TRUNCATED, [])


async def test_a_cancelled_rollout_deletes_its_session(served: Served) -> None:
    fake, args = served
    started = asyncio.Event()

    async def run(**given: Any) -> None:
        started.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(generate(ask(args, run)))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert fake.deleted == list(fake.sessions)


async def test_the_servers_key_is_sent_and_given_to_the_agent(served: Served) -> None:
    fake, args = served
    fake.api_key = "secret"
    with pytest.raises(SessionServerError, match="401: a key is needed"):
        await generate(ask(args))
    args.session_api_key = "secret"
    seen: dict[str, Any] = {}

    async def run(metadata: dict[str, Any], **given: Any) -> None:
        seen.update(metadata)

    await generate(ask(args, run))
    assert seen["session_api_key"] == "secret"


async def test_without_an_agent_the_flag_is_named() -> None:
    given = GenerateFnInput(RolloutState(RolloutArgs()), Sample(), {})
    with pytest.raises(ConfigError, match="--agent NAME"):
        await generate(given)


async def test_a_state_of_another_trainer_is_enough(served: Served) -> None:
    args = SimpleNamespace(session_server_url=served[1].session_server_url)
    sample = Sample(prompt="What is 2 + 2?", label="4")
    output = await generate(GenerateFnInput(SimpleNamespace(args=args, agent=Agent(calculator)), sample, {}))
    assert output.as_list()[0].reward == 1.0


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"partial_rollout": True, "use_session_server": "v2"}, "--partial-rollout with tree histories"),
        ({"apply_chat_template": True}, "--apply-chat-template with --generate agentic"),
    ],
)
async def test_settings_that_do_not_go_together_are_refused(
    served: Served, settings: dict[str, Any], text: str
) -> None:
    for name, value in settings.items():
        setattr(served[1], name, value)
    with pytest.raises(ConfigError, match=text):
        await generate(ask(served[1]))
    assert served[0].sessions == {}


DEEP = "[" * 100_000


@pytest.mark.parametrize("payload", [DEEP, "[]", "{}", "<html>"])
async def test_what_answers_and_is_no_session_server_is_named(payload: str) -> None:
    async with answering(200, payload) as url:
        with pytest.raises(SessionServerError, match=f"POST {url}/sessions: no session server answers there"):
            await generate(ask(RolloutArgs(session_server_url=url)))


async def test_a_refusal_in_deep_json_is_shown_as_it_is() -> None:
    async with answering(500, DEEP) as url:
        with pytest.raises(SessionServerError, match=r"500: \[\[\[") as raised:
            await generate(ask(RolloutArgs(session_server_url=url)))
    assert raised.value.status == 500


@asynccontextmanager
async def answering(status: int, text: str) -> AsyncIterator[str]:
    """Something that says one thing to everybody."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, text=text)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")
