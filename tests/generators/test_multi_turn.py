"""The tool loop over `/generate`: calls, joins, and tokens in step whatever happens."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.chat_tokenizer import IM_END, IM_START, chat_family, chat_tokenizer, encode
from helpers.fake_generate import FakeGenerate, reply, says, state_of
from miles_core.errors import ConfigError
from miles_core.types import GenerateFnInput, Sample, SampleStatus
from miles_generators.multi_turn import generate
from miles_tito_families.qwen3 import FAMILY

PROMPT: list[dict[str, Any]] = [{"role": "user", "content": "What is 3 * 7?"}]


def spec(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [spec("double"), spec("meet"), spec("fail"), spec("exit"), spec("cancel"), spec("facts")]
PROMPT_IDS = encode(chat_family().render(PROMPT, TOOLS))
RUNS: list[tuple[str, Any]] = []
MEETING: list[asyncio.Event] = []


@pytest.fixture(autouse=True)
def no_runs() -> None:
    RUNS.clear()
    MEETING[:] = [asyncio.Event(), asyncio.Event()]


async def execute(name: str, arguments: dict[str, Any]) -> Any:
    """Every tool of these tests; `meet` returns only when both calls of it are under way."""
    RUNS.append((name, arguments))
    match name:
        case "double":
            return str(2 * arguments["n"])
        case "meet":
            MEETING[arguments["n"]].set()
            await asyncio.gather(*(event.wait() for event in MEETING))
            await asyncio.sleep(0.02 * (1 - arguments["n"]))  # the first answers last
            return f"met {arguments['n']}"
        case "fail":
            raise ValueError("no luck")
        case "exit":
            raise SystemExit(3)
        case "cancel":
            raise asyncio.CancelledError
    return {"n": [1, None]}


def execute_sync(name: str, arguments: dict[str, Any]) -> str:
    return f"sync {name}"


def state(engine: FakeGenerate, **args: Any) -> Any:
    flags = {
        "generate_execute_tool_function_path": f"{__name__}.execute",
        "generate_tool_specs_path": f"{__name__}.TOOLS",
        "generate_max_turns": 4,
        "generate_tool_call_parser": None,
    }
    return state_of(engine.url, **{**flags, **args})


async def run(engine: FakeGenerate, sample: Sample | None = None, *, on: Any = None, **params: Any) -> Sample:
    given = Sample(index=3, prompt=PROMPT) if sample is None else sample
    output = await generate(GenerateFnInput(on or state(engine), given, params))
    assert isinstance(output.samples, Sample)
    output.samples.validate()
    check(output.samples)
    return output.samples


def check(sample: Sample) -> None:
    """Masked tokens have no log-probability, sampled ones have theirs."""
    assert sample.loss_mask is not None
    assert sample.rollout_log_probs is not None
    for on, value in zip(sample.loss_mask, sample.rollout_log_probs, strict=True):
        assert (value < 0) == bool(on)


def spans(sample: Sample) -> list[list[int]]:
    """The sampled ids, one list per generation."""
    out: list[list[int]] = []
    before = 0
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    for number, on in zip(response, sample.loss_mask or [], strict=True):
        if on and not before:
            out.append([])
        if on:
            out[-1].append(number)
        before = on
    return out


def answers(engine: FakeGenerate, request: int = 1) -> str:
    """What the tools said, as the engine was sent it."""
    new = engine.requests[request]["input_ids"][len(PROMPT_IDS) :]
    text = chat_tokenizer().decode(new)
    return text.partition("<|im_end|>")[2]


async def test_two_turns_are_what_the_template_gives(engine: FakeGenerate) -> None:
    first, last = says("", ("double", '{"n": 4}')), says("It is 8.")
    engine.script = [first, last]
    sample = await run(engine)
    call = {"type": "function", "function": {"name": "double", "arguments": '{"n": 4}'}}
    history = [
        *PROMPT,
        {"role": "assistant", "content": "", "reasoning_content": "Well.", "tool_calls": [call]},
        {"role": "tool", "content": "8"},
    ]
    assert engine.requests[0]["input_ids"] == PROMPT_IDS
    assert engine.requests[1]["input_ids"] == encode(chat_family().render(history, TOOLS))
    assert sample.tokens == [*engine.requests[1]["input_ids"], *last["output_ids"]]
    assert spans(sample) == [first["output_ids"], last["output_ids"]]
    assert (sample.status, sample.weight_versions) == (SampleStatus.COMPLETED, ["w1", "w1"])
    assert sample.response.startswith("<think>\nWell.")
    assert RUNS == [("double", {"n": 4})]
    assert sample.non_generation_time > 0


async def test_calls_run_at_once_and_answer_in_their_order(engine: FakeGenerate) -> None:
    engine.script = [says("", ("meet", '{"n": 0}'), ("meet", '{"n": 1}'))]
    await run(engine)
    text = answers(engine)
    assert 0 < text.index("met 0") < text.index("met 1")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (("fail", "{}"), "error: ValueError: no luck"),
        (("exit", "{}"), "error: SystemExit: 3"),
        (("cancel", "{}"), "error: the tool cancelled itself"),
        (("facts", "{}"), '{"n": [1, null]}'),
    ],
)
async def test_what_a_tool_does_is_its_answer(engine: FakeGenerate, call: tuple[str, str], text: str) -> None:
    engine.script = [says("", call)]
    assert (await run(engine)).status is SampleStatus.COMPLETED
    assert f"<tool_response>\n{text}\n</tool_response>" in answers(engine)


async def test_an_unknown_tool_is_not_run(engine: FakeGenerate) -> None:
    engine.script = [says("", ("doubel", "{}"), ("double", '{"n": 1}'))]
    await run(engine)
    text = answers(engine)
    assert text.index("error: no tool is named doubel; there is double, meet") < text.index("\n2\n")
    assert RUNS == [("double", {"n": 1})]


@pytest.mark.parametrize(
    "arguments", ['{"n": 1', '{"n": 1}}', "[1]", '"[1]"', '{"n": ' + "[" * 9_000 + "]" * 9_000 + "}"]
)
async def test_a_malformed_call_is_never_run(engine: FakeGenerate, arguments: str) -> None:
    engine.script = [says("", ("double", arguments))]
    sample = await run(engine)
    assert (sample.status, RUNS, len(engine.requests)) == (SampleStatus.COMPLETED, [], 1)


async def test_a_length_stop_runs_nothing(engine: FakeGenerate) -> None:
    engine.script = [says("", ("double", '{"n": 1}'), finish="length")]
    sample = await run(engine)
    assert (sample.status, RUNS, len(engine.requests)) == (SampleStatus.TRUNCATED, [], 1)


async def test_no_more_turns_than_allowed(engine: FakeGenerate) -> None:
    engine.script = [says("", ("double", '{"n": 1}'))] * 9
    sample = await run(engine, on=state(engine, generate_max_turns=3))
    assert (len(engine.requests), len(spans(sample)), len(RUNS)) == (3, 3, 2)
    assert sample.status is SampleStatus.COMPLETED
    assert sample.loss_mask is not None
    assert sample.loss_mask[-1] == 1, "the last generation's calls are not answered for nobody"


async def test_answers_that_do_not_fit_end_the_sample(engine: FakeGenerate) -> None:
    engine.script = [first := says("", ("double", '{"n": 1}'))]
    room = len(PROMPT_IDS) + len(first["output_ids"]) + 4
    sample = await run(engine, on=state(engine, rollout_max_context_len=room))
    assert (sample.status, len(engine.requests)) == (SampleStatus.TRUNCATED, 1)
    assert sample.tokens == [*PROMPT_IDS, *first["output_ids"]]


async def test_an_engine_whose_context_is_shorter_ends_the_sample(engine: FakeGenerate) -> None:
    full = (400, "Requested token count exceeds the model's maximum context length of 64 tokens.")
    engine.script = [first := says("", ("double", '{"n": 1}')), full]
    sample = await run(engine)
    assert (sample.status, sample.tokens) == (SampleStatus.TRUNCATED, [*PROMPT_IDS, *first["output_ids"]])


async def test_each_turn_has_the_whole_of_max_new_tokens_and_the_rest_of_the_context(engine: FakeGenerate) -> None:
    engine.script = [says("", ("double", '{"n": 1}'))]
    await run(engine, on=state(engine, rollout_max_context_len=len(PROMPT_IDS) + 80), max_new_tokens=60)
    sent = [each["sampling_params"]["max_new_tokens"] for each in engine.requests]
    assert sent == [60, len(PROMPT_IDS) + 80 - len(engine.requests[1]["input_ids"])]


async def test_a_turn_that_was_aborted_goes_on(engine: FakeGenerate) -> None:
    whole = says("", ("double", '{"n": 4}'))["output_ids"]
    engine.script = [reply(whole[:9], "abort"), reply(whole[9:]), last := says("It is 8.")]
    sample = await run(engine, max_new_tokens=40)
    assert (sample.status, sample.tokens, RUNS) == (SampleStatus.ABORTED, [*PROMPT_IDS, *whole[:9]], [])
    sample = await run(engine, sample, max_new_tokens=40)
    assert engine.requests[1]["sampling_params"]["max_new_tokens"] == 31
    assert engine.requests[2]["sampling_params"]["max_new_tokens"] == 40
    assert (spans(sample), RUNS) == ([whole, last["output_ids"]], [("double", {"n": 4})])


async def test_tools_do_not_run_again_when_a_sample_goes_on(engine: FakeGenerate) -> None:
    queued = {"text": "", "output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}, "completion_tokens": 0}}
    engine.script = [first := says("", ("double", '{"n": 4}')), queued, last := says("It is 8.")]
    sample = await run(engine)
    assert (sample.status, len(RUNS)) == (SampleStatus.ABORTED, 1)
    sample = await run(engine, sample)
    assert engine.requests[2]["input_ids"] == engine.requests[1]["input_ids"]
    assert (spans(sample), len(RUNS)) == ([first["output_ids"], last["output_ids"]], 1)


async def test_an_aborted_run_stops_after_the_tools_and_goes_on_later(engine: FakeGenerate) -> None:
    on = state(engine)

    def stop(body: dict[str, Any]) -> dict[str, Any]:
        on.aborted = True
        return says("", ("double", '{"n": 4}'))

    engine.script = [stop]
    sample = await run(engine, on=on)
    assert (sample.status, len(engine.requests), len(RUNS)) == (SampleStatus.ABORTED, 1, 1)
    on.aborted = False
    sample = await run(engine, sample, on=on)
    assert (sample.status, len(RUNS), len(spans(sample))) == (SampleStatus.COMPLETED, 1, 2)


async def test_a_finished_generation_whose_calls_wait_is_answered_first(engine: FakeGenerate) -> None:
    engine.script = [first := says("", ("double", '{"n": 4}'))]
    sample = await run(engine, on=state(engine, generate_max_turns=1))
    sample.status = SampleStatus.ABORTED
    sample = await run(engine, sample)
    assert (len(RUNS), sample.tokens[: len(PROMPT_IDS) + len(first["output_ids"])]) == (
        1,
        [*PROMPT_IDS, *first["output_ids"]],
    )


async def test_a_role_marker_that_the_next_turn_writes_is_dropped(engine: FakeGenerate) -> None:
    on = state(engine)
    on.family = replace(
        FAMILY, role_stop_tokens=("<|im_start|>",), stop_tokens=("<|im_end|>", "<|im_start|>"), max_trim_tokens=1
    ).bind(chat_tokenizer())
    ids = [*says("", ("double", '{"n": 4}'))["output_ids"][:-1], IM_START]
    engine.script = [reply(ids)]
    sample = await run(engine, on=on)
    assert spans(sample)[0] == ids[:-1]
    assert sample.tokens[len(PROMPT_IDS) + len(ids) - 1] == IM_START
    assert sample.loss_mask is not None
    assert sample.loss_mask[len(ids) - 1] == 0


async def test_without_tools_one_turn_is_all(engine: FakeGenerate) -> None:
    sample = await run(engine, on=state_of(engine.url))
    assert (sample.status, len(engine.requests)) == (SampleStatus.COMPLETED, 1)
    assert engine.requests[0]["input_ids"] == encode(chat_family().render(PROMPT))


async def test_tools_from_a_file_and_a_sync_function(engine: FakeGenerate, tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text(json.dumps([spec("look")]))
    on = state(
        engine,
        generate_tool_specs_path=str(tmp_path / "tools.json"),
        generate_execute_tool_function_path=f"{__name__}.execute_sync",
    )
    engine.script = [says("", ("look", "{}"))]
    await run(engine, on=on)
    assert "sync look" in chat_tokenizer().decode(engine.requests[1]["input_ids"])


async def test_tools_of_the_prompt_itself(engine: FakeGenerate) -> None:
    engine.script = [says("", ("look", "{}"))]
    on = state(engine, generate_tool_specs_path=None)
    await run(engine, Sample(prompt=PROMPT, metadata={"tools": [spec("look")]}), on=on)
    assert RUNS == [("look", {})]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"generate_tool_call_parser": "glm47"}, "--generate-tool-call-parser glm47: family qwen3 reads calls as qwen"),
        ({"generate_execute_tool_function_path": None}, "give --generate-execute-tool-function-path"),
        (
            {"generate_execute_tool_function_path": "no.such"},
            "function-path no.such: No module",
        ),
        (
            {"generate_execute_tool_function_path": f"{__name__}.RUNS"},
            r"test_multi_turn.RUNS: not a function; give package.module.name$",
        ),
        ({"generate_tool_specs_path": "nothing"}, "--generate-tool-specs-path nothing"),
        ({"generate_tool_specs_path": f"{__name__}.RUNS.x"}, "--generate-tool-specs-path"),
        ({"generate_tool_specs_path": f"{__name__}.execute"}, "expected a list of tools"),
        ({"generate_max_turns": 0}, "--generate-max-turns 0: expected 1 or more"),
    ],
)
async def test_wrong_flags_are_named(engine: FakeGenerate, flags: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        await run(engine, on=state(engine, **flags))
    assert engine.requests == []


async def test_a_cancelled_sample_cancels_its_tools(engine: FakeGenerate) -> None:
    engine.script = [says("", ("meet", '{"n": 0}'))]
    task = asyncio.create_task(run(engine))
    await MEETING[0].wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_the_last_token_of_an_answer_is_a_stop_token() -> None:
    assert says("x")["output_ids"][-1] == IM_END
