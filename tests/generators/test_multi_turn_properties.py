"""The tool loop under aborts, length stops and full contexts at any place: tokens, mask and log-probs stay in step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.chat_tokenizer import IM_END, chat_family, encode
from helpers.fake_engine import sampled_text
from helpers.fake_generate import state_of
from miles_core.types import GenerateFnInput, Sample, SampleStatus
from miles_generators.multi_turn import generate

PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("good", "bad")]
PROMPT = [{"role": "user", "content": "What is 3 * 7?"}]
PROMPT_IDS = encode(chat_family().render(PROMPT, TOOLS))
MOST_TURNS = 4
RUNS: list[tuple[str, Any]] = []


async def execute(name: str, arguments: dict[str, Any]) -> Any:
    """Counts; one of the tools always fails."""
    RUNS.append((name, arguments["n"]))
    await asyncio.sleep(0)
    if name == "bad":
        raise ValueError("no luck")
    return arguments["n"] * 2


calls = st.lists(st.tuples(st.sampled_from(["good", "bad", "unknown"]), st.integers(0, 99)), max_size=3)
turns = st.fixed_dictionaries(
    {
        "calls": calls,
        "malformed": st.booleans(),
        "content": st.sampled_from(["", "It is 21.", "ü 😀"]),
        "cuts": st.lists(st.floats(0, 1), max_size=3),
    }
)


class Model:
    """Says its turns; an abort cuts one anywhere, and the next request that goes on from there gets the rest."""

    def __init__(self, script: list[dict[str, Any]], window: int | None, budget: int | None) -> None:
        self.script, self.window, self.budget = list(script), window, budget
        self.rest: list[int] = []
        self.cuts: list[float] = []
        self.expected: list[tuple[str, Any]] = []
        self.now: list[tuple[str, Any]] = []
        self.turns = 0
        self.sampled: list[list[int]] = []
        """Ids of each turn, over all its parts."""
        self.log_probs: list[list[float]] = []
        self.last: list[int] = []
        self.worker = "http://model"

    @asynccontextmanager
    async def lane(self, key: str | None = None) -> AsyncIterator[Model]:
        """One worker is enough."""
        yield self

    def _begin(self) -> None:
        last: dict[str, Any] = {"calls": [], "malformed": False, "content": "Done.", "cuts": []}
        turn = self.script.pop(0) if self.script else last
        made = [(name, f'{{"n": {number}}}') for name, number in turn["calls"]]
        content = turn["content"]
        if turn["malformed"]:
            made, content = [], content + '<tool_call>\n{"name": "good", "arguments": {"n": \n</tool_call>'
        self.now = [(name, number) for name, number in turn["calls"] if name != "unknown"] if made else []
        self.rest = [*encode(sampled_text(content, "Well.", made)), IM_END]
        self.cuts = list(turn["cuts"])
        self.sampled.append([])
        self.log_probs.append([])
        self.turns += 1

    async def generate(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """One request, whose prompt must go on from everything before it."""
        prompt, most = payload["input_ids"], payload["sampling_params"].get("max_new_tokens")
        if self.rest:
            assert prompt == self.last, "an aborted turn goes on from exactly what it had"
        else:
            assert prompt[: len(self.last)] == self.last or not self.last
            self._begin()
        if self.window is not None:
            assert len(prompt) + most <= self.window
        room = len(self.rest) if most is None else min(most, len(self.rest))
        assert room > 0
        finish = "stop" if room == len(self.rest) else "length"
        if self.cuts:
            finish, room = "abort", min(int(self.cuts.pop(0) * room), room - 1)
        ids, self.rest = self.rest[:room], self.rest[room:]
        if finish == "length":
            self.rest = []
        if finish == "stop" and self.turns < MOST_TURNS:
            self.expected += self.now
        values = [-(len(prompt) + at + 1) / 4096 for at in range(len(ids))]
        self.sampled[-1] += ids
        self.log_probs[-1] += values
        self.last = [*prompt, *ids]
        logged = [[value, number, None] for value, number in zip(values, ids, strict=True)]
        meta = {"finish_reason": {"type": finish}, "completion_tokens": len(ids), "output_token_logprobs": logged}
        return {"text": "", "output_ids": ids, "meta_info": meta}


def state(model: Model) -> Any:
    found = state_of(
        generate_execute_tool_function_path=f"{__name__}.execute",
        generate_tool_specs_path=f"{__name__}.TOOLS",
        generate_max_turns=MOST_TURNS,
        generate_tool_call_parser=None,
        rollout_max_context_len=model.window,
    )
    found.engines = model  # type: ignore[assignment]  # all that is used of it is `lane`
    return found


@settings(max_examples=150, deadline=None)
@given(
    script=st.lists(turns, max_size=5),
    room=st.none() | st.integers(-2, 400),
    budget=st.none() | st.integers(1, 120),
    stops=st.lists(st.booleans(), max_size=6),
)
def test_tokens_mask_and_log_probs_stay_in_step(
    script: list[dict[str, Any]], room: int | None, budget: int | None, stops: list[bool]
) -> None:
    RUNS.clear()
    model = Model(script, None if room is None else len(PROMPT_IDS) + room, budget)
    params = {} if budget is None else {"max_new_tokens": budget}
    sample = asyncio.run(until_over(model, Sample(index=1, prompt=PROMPT), params, list(stops)))
    sample.validate()
    assert sample.tokens[: len(PROMPT_IDS)] == PROMPT_IDS, "a prompt is never cut"
    assert sample.tokens == model.last or not model.last or sample.tokens[: len(model.last)] == model.last
    assert sample.loss_mask is not None
    assert sample.rollout_log_probs is not None
    start = len(sample.tokens) - sample.response_length
    on = [at for at, flag in enumerate(sample.loss_mask) if flag]
    assert [sample.tokens[start + at] for at in on] == [number for turn in model.sampled for number in turn]
    assert [sample.rollout_log_probs[at] for at in on] == [value for turn in model.log_probs for value in turn]
    assert all(sample.rollout_log_probs[at] == 0.0 for at, flag in enumerate(sample.loss_mask) if not flag)
    if model.window is not None and model.last:
        assert len(sample.tokens) <= model.window, "what does not fit is not appended"
    if budget is not None:
        assert all(len(turn) <= budget for turn in model.sampled)
    assert sorted(RUNS) == sorted(model.expected), "each call once, a malformed one and an unknown tool never"
    assert sample.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)
    assert len(model.sampled) <= MOST_TURNS


async def until_over(model: Model, sample: Sample, params: dict[str, Any], stops: list[bool]) -> Sample:
    """Give the sample back for as long as it comes back aborted; some runs are stopped before they ask."""
    for _ in range(60):
        found = state(model)
        found.aborted = stops.pop(0) if stops else False
        output = await generate(GenerateFnInput(found, sample, dict(params)))
        (sample,) = output.as_list()
        if sample.status is not SampleStatus.ABORTED:
            return sample
        sample = Sample.from_dict(sample.to_dict())
    raise AssertionError("it never ends")
