"""One generation per sample: tokens in step, budgets, aborts, and engines that fail."""

from __future__ import annotations

import asyncio
import base64
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from helpers.chat_tokenizer import END_OF_TEXT, IM_END, chat_family, encode
from helpers.fake_generate import FakeGenerate, reply, says, state_of
from miles_core.errors import ConfigError, EngineError, EngineReplyError
from miles_core.rollout import engines
from miles_core.types import GenerateFnInput, Sample, SampleStatus
from miles_generators.single_turn import generate

PROMPT: list[dict[str, Any]] = [{"role": "user", "content": "What is 3 * 7?"}]
PROMPT_IDS = encode(chat_family().render(PROMPT))


async def run(engine: FakeGenerate, sample: Sample | None = None, *, state: Any = None, **params: Any) -> Sample:
    given = Sample(index=3, prompt=PROMPT) if sample is None else sample
    output = await generate(GenerateFnInput(state or state_of(engine.url), given, params))
    assert isinstance(output.samples, Sample)
    output.samples.validate()
    return output.samples


async def test_one_answer(engine: FakeGenerate) -> None:
    engine.script = [answer := says("It is 21.")]
    sample = await run(engine, temperature=0.7, max_new_tokens=50, top_k=None)
    ids = answer["output_ids"]
    assert sample.tokens == [*PROMPT_IDS, *ids]
    assert sample.loss_mask == [1] * len(ids)
    assert sample.rollout_log_probs == [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    assert (sample.status, sample.response_length) == (SampleStatus.COMPLETED, len(ids))
    assert sample.response.endswith("It is 21.<|im_end|>")
    assert (sample.weight_versions, sample.prefix_cache_info.cached_tokens) == (["w1"], 2)
    sent = engine.requests[0]
    assert sent["input_ids"] == PROMPT_IDS
    assert sent["return_logprob"] is True
    assert sent["sampling_params"] == {
        "temperature": 0.7,
        "max_new_tokens": 50,
        "stop_token_ids": [END_OF_TEXT, IM_END],
    }


async def test_a_text_prompt_is_sent_as_it_is(engine: FakeGenerate) -> None:
    sample = await run(engine, Sample(prompt="Hello <|im_end|>"))
    assert engine.requests[0]["input_ids"] == encode("Hello <|im_end|>")
    assert sample.tokens[: -sample.response_length] == encode("Hello <|im_end|>")


async def test_tools_of_the_metadata_and_template_settings_are_rendered(engine: FakeGenerate) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    state = state_of(engine.url, chat_template_kwargs={"enable_thinking": False})
    await run(engine, Sample(prompt=PROMPT, metadata={"tools": [tool]}), state=state)
    expected = chat_family().render(PROMPT, [tool], {"enable_thinking": False})
    assert engine.requests[0]["input_ids"] == encode(expected)


@pytest.mark.parametrize(
    ("window", "limit", "sent"),
    [(None, None, None), (None, 9, 9), (100, 200, 100), (5, 9, 5), (9, 5, 5), (5, None, 5)],
)
async def test_new_tokens_are_capped_by_the_context(
    engine: FakeGenerate, window: int | None, limit: int | None, sent: int | None
) -> None:
    context = None if window is None else len(PROMPT_IDS) + window
    state = state_of(engine.url, rollout_max_context_len=context)
    await run(engine, state=state, max_new_tokens=limit)
    assert engine.requests[0]["sampling_params"].get("max_new_tokens") == sent


@pytest.mark.parametrize("name", ["max_seq_len", "rollout_max_context_len"])
@pytest.mark.parametrize("room", [0, -4])
async def test_a_full_context_is_truncated_without_a_call(engine: FakeGenerate, name: str, room: int) -> None:
    state = state_of(engine.url, **{name: len(PROMPT_IDS) + room})
    sample = await run(engine, state=state, max_new_tokens=5)
    assert (sample.status, sample.tokens, sample.response_length) == (SampleStatus.TRUNCATED, PROMPT_IDS, 0)
    assert engine.requests == []


async def test_an_engine_whose_context_is_shorter_truncates(engine: FakeGenerate) -> None:
    engine.script = [(400, "The input (40 tokens) is longer than the model's context length (32 tokens).")]
    sample = await run(engine)
    assert (sample.status, sample.tokens) == (SampleStatus.TRUNCATED, PROMPT_IDS)


async def test_a_partial_sample_goes_on_with_what_is_left(engine: FakeGenerate) -> None:
    first = encode("It is ")
    engine.script = [reply(first, "abort"), reply([*encode("21."), IM_END])]
    sample = await run(engine, max_new_tokens=50)
    assert (sample.status, sample.response) == (SampleStatus.ABORTED, "It is ")
    sample = await run(engine, sample, max_new_tokens=50)
    assert engine.requests[1]["input_ids"] == [*PROMPT_IDS, *first]
    assert engine.requests[1]["sampling_params"]["max_new_tokens"] == 50 - len(first)
    assert (sample.status, sample.response) == (SampleStatus.COMPLETED, "It is 21.<|im_end|>")
    assert sample.loss_mask == [1] * sample.response_length
    assert sample.weight_versions == ["w1", "w1"]


async def test_a_partial_sample_without_budget_is_truncated(engine: FakeGenerate) -> None:
    engine.script = [reply(first := encode("It is "), "abort")]
    sample = await run(engine, max_new_tokens=len(first))
    sample = await run(engine, sample, max_new_tokens=len(first))
    assert (sample.status, len(engine.requests)) == (SampleStatus.TRUNCATED, 1)


async def test_a_partial_sample_without_log_probs_is_refused(engine: FakeGenerate) -> None:
    sample = Sample(index=3, prompt=PROMPT, tokens=[*PROMPT_IDS, 5], response_length=1, status=SampleStatus.ABORTED)
    with pytest.raises(ValueError, match="sample 3 is partial, and has no rollout_log_probs"):
        await run(engine, sample)


async def test_a_finished_sample_is_left_alone(engine: FakeGenerate) -> None:
    sample = await run(engine)
    again = await run(engine, sample)
    assert (again, len(engine.requests)) == (sample, 1)


async def test_a_request_that_was_aborted_in_the_queue(engine: FakeGenerate) -> None:
    queued = {"text": "", "output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}, "completion_tokens": 0}}
    engine.script = [queued]
    sample = await run(engine)
    assert (sample.status, sample.tokens) == (SampleStatus.ABORTED, PROMPT_IDS)


async def test_an_aborted_run_calls_nothing(engine: FakeGenerate) -> None:
    state = state_of(engine.url)
    state.aborted = True
    assert (await run(engine, state=state)).status is SampleStatus.ABORTED
    assert engine.requests == []


async def test_a_length_stop_is_truncated(engine: FakeGenerate) -> None:
    engine.script = [says("It is", finish="length")]
    assert (await run(engine)).status is SampleStatus.TRUNCATED


async def test_a_cancelled_sample_tells_the_engine(engine: FakeGenerate) -> None:
    engine.hold = asyncio.Event()
    task = asyncio.create_task(run(engine))
    await engine.entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.aborted == [engine.requests[0]["rid"]]


async def test_a_failing_worker_is_left_for_another(engine: FakeGenerate) -> None:
    async with FakeGenerate().serving() as other:
        engine.script, other.script = [503] * 9, [503] * 9
        tried = state_of(engine.url, other.url)
        engine.script[1] = other.script[1] = says("Fine.")
        sample = await run(engine, state=tried)
        assert sample.status is SampleStatus.COMPLETED
        assert {len(engine.requests), len(other.requests)} == {1, 2}


async def test_engines_that_stay_down_raise(engine: FakeGenerate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "TRIES", 3)
    engine.script = [503] * 9
    with pytest.raises(EngineError, match="503: scripted 503"):
        await run(engine)
    assert len(engine.requests) == 3


async def test_a_refusal_is_not_repeated(engine: FakeGenerate) -> None:
    engine.script = [(400, "top_p must be in (0, 1]")]
    with pytest.raises(EngineError, match=r"400: top_p must be in \(0, 1\]"):
        await run(engine)
    assert len(engine.requests) == 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"output_token_logprobs": None}, "lacks meta_info.output_token_logprobs"),
        ({"completion_tokens": 7}, "2 output_token_logprobs for completion_tokens=7"),
        ({"output_token_logprobs": [[-1.0, 10**7, None]] * 2}, "sampled token 10000000"),
        ({"finish_reason": None}, "lacks meta_info with a finish_reason"),
    ],
)
async def test_an_answer_that_cannot_be_believed_is_refused(
    engine: FakeGenerate, change: dict[str, Any], text: str
) -> None:
    engine.script = [reply([5, IM_END], **change)]
    with pytest.raises(EngineReplyError, match=text):
        await run(engine)


async def test_routed_experts_are_read(engine: FakeGenerate) -> None:
    rows = len(PROMPT_IDS) + 1
    experts = np.arange(rows * 6, dtype=np.int32)
    engine.script = [reply([5, IM_END], routed_experts=base64.b64encode(experts.tobytes()).decode())]
    sample = await run(engine, state=state_of(engine.url, use_rollout_routing_replay=True, num_layers=3))
    assert engine.requests[0]["return_routed_experts"] is True
    assert sample.rollout_routed_experts.tolist() == experts.reshape(rows, 3, 2).tolist()


async def test_requests_to_the_engine_are_limited(engine: FakeGenerate) -> None:
    state = state_of(engine.url, limit=2)
    await asyncio.gather(*(run(engine, state=state) for _ in range(8)))
    assert (len(engine.requests), engine.most) == (8, 2)


async def test_without_an_engine_the_flag_is_named(engine: FakeGenerate) -> None:
    with pytest.raises(ConfigError, match="--engine URL"):
        await run(engine, state=state_of())


class Letters:
    """The tokenizer of another trainer's state."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(self, messages: Any, tools: Any, tokenize: bool, add_generation_prompt: bool) -> str:
        assert (tokenize, add_generation_prompt) == (False, True)
        return str(messages[0]["content"])


@pytest.mark.parametrize("prompt", ["hi", [{"role": "user", "content": "hi"}]])
async def test_a_state_of_another_trainer_is_enough(engine: FakeGenerate, prompt: Any) -> None:
    port = int(engine.url.rpartition(":")[2])
    args = SimpleNamespace(sglang_router_ip="127.0.0.1", sglang_router_port=port)
    engine.script = [reply([111, 107])]
    sample = await run(engine, Sample(prompt=prompt), state=SimpleNamespace(args=args, tokenizer=Letters()))
    assert (sample.tokens, sample.response) == ([104, 105, 111, 107], "ok")
