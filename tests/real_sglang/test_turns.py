"""Sessions in front of SGLang: exact ids and log-probabilities, its own rendering, weight versions, aborts, a crash."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.programs import runs
from helpers.sessions import WEATHER, Answer, Talk, request, tool, user
from miles_core.server.app import ServerThread
from miles_engines.sglang import SGLangEngine

CALL = r'<tool_call>\n\{"name": "get_weather", "arguments": \{"city": "[A-Z][a-z]{4,8}"\}\}\n</tool_call>'
"""Random weights spell a call token by token as no tokenizer would."""

SHORT = {"max_tokens": 12, "seed": 7, "chat_template_kwargs": {"enable_thinking": False}}
FORCED = {**SHORT, "max_tokens": 80, "regex": CALL, "tools": [WEATHER]}


def restarted(told: list[str]) -> bool:
    return any(line.startswith("sglang serves again at ") for line in told)


def patient(url: str, body: dict[str, Any]) -> Answer:
    """A POST that may take long on a busy machine."""
    return request(url, "POST", body, timeout=600)


def ask(talk: Talk, *messages: dict[str, Any], **fields: Any) -> Answer:
    """A turn that must succeed."""
    sent = [*talk.history, *messages]
    answer = patient(talk.chat_url, {"model": "m", "messages": sent, **fields})
    assert answer.status == 200, answer.body
    talk.history = [*sent, answer.message]
    return answer


@pytest.fixture(scope="module")
def score(model: Path) -> Any:
    """Log-probabilities of a sequence's tokens from the second on, by `transformers`."""
    import torch
    from transformers import Qwen3ForCausalLM

    network = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def scored(tokens: list[int]) -> list[float]:
        with torch.no_grad():
            logits = network(torch.tensor([tokens])).logits[0, :-1]
        picked = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])
        return [float(value) for value in picked[:, 0]]

    return scored


def test_the_launcher_set_the_parsers_and_ran_the_plugin_in_every_process(
    engine: SGLangEngine, ran: Path, told: list[str]
) -> None:
    (url,) = engine.urls
    info = request(f"{url}/server_info", timeout=600).json
    assert info["reasoning_parser"] == "qwen3"
    assert info["tool_call_parser"] == "qwen"  # which is what SGLang calls qwen25 once it has read its flags
    (worker,) = engine.workers
    noted = [line.split() for line in ran.read_text().splitlines()]
    assert sorted(int(pid) for pid, *_ in noted) == sorted(worker.processes())
    assert len(noted) == 3
    assert {tuple(rest) for _, *rest in noted} == {("qwen25", "4096")}
    assert told[0].startswith("SGLang 0.5.23 of /")
    assert told[1] == f"the log of sglang at {url} is {worker.recipe.log}"


def test_sampled_tokens_stay_as_they_are_with_their_log_probabilities(server: ServerThread, score: Any) -> None:
    talk = Talk(server.url)
    first = ask(talk, user("What is the weather in Paris?"), **FORCED)
    (call,) = first.message["tool_calls"]
    assert re.fullmatch(r'\{"city": "[A-Z][a-z]{4,8}"\}', call["function"]["arguments"])
    second = ask(talk, tool("18 degrees", call["id"]), **FORCED)
    ids = [call["id"] for call in second.message["tool_calls"]]
    ask(talk, tool("19 degrees", ids[0]), user("And?"), **{**SHORT, "tools": [WEATHER], "max_tokens": 40})

    records = talk.records
    (sample,) = talk.samples().samples
    tokens = [int(token) for token in sample["tokens"]]
    start = len(tokens) - sample["response_length"]
    mask = [bool(value) for value in sample["loss_mask"]]
    expected = [0.0, *score(tokens)][start:]
    free = len(records[2]["request"]["input_ids"]) - start  # under a regex they are those of the allowed tokens
    differences = [
        abs(float(got) - want)
        for at, (got, want) in enumerate(zip(sample["rollout_log_probs"], expected, strict=True))
        if mask[at] and at >= free
    ]
    assert len(differences) == len(mask) - free == 40
    assert max(differences) < 1e-4
    for record in records:
        sampled = [entry[1] for entry in record["response"]["choices"][0]["meta_info"]["output_token_logprobs"]]
        end = len(record["request"]["input_ids"]) + len(sampled)
        assert tokens[:end][-len(sampled) :] == sampled
        assert record["request"]["input_ids"] == tokens[: end - len(sampled)]
    forced = [entry[1] for entry in records[0]["response"]["choices"][0]["meta_info"]["output_token_logprobs"]]
    tokenizer = server.parts.family.tokenizer
    assert tokenizer.encode(tokenizer.decode(forced)) != forced
    mismatch = talk.metadata["tito_session_mismatch"]
    assert {entry["type"] for entry in mismatch} <= {"assistant_text"}


@pytest.mark.parametrize("tools", [None, [WEATHER]])
@pytest.mark.parametrize("thinking", [True, False])
def test_the_first_turn_is_rendered_as_sglang_renders_it(
    server: ServerThread, engine: SGLangEngine, tools: Any, thinking: bool
) -> None:
    messages = [{"role": "system", "content": "Be brief."}, user("Wie ist das Wetter in Köln? 晴れ?")]
    fields = {"max_tokens": 1, "chat_template_kwargs": {"enable_thinking": thinking}, "tools": tools}
    talk = Talk(server.url)
    ask(talk, *messages, **fields)
    plain = patient(
        f"{engine.urls[0]}/v1/chat/completions",
        {"model": "m", "messages": messages, "return_prompt_token_ids": True, **fields},
    )
    assert plain.status == 200, plain.body
    family = server.parts.family

    def rendered(tools: Any) -> list[int]:
        return list(family.tokenizer.encode(family.render(messages, tools, fields["chat_template_kwargs"])))

    assert talk.records[0]["request"]["input_ids"] == rendered(tools)
    # this release of SGLang adds a key to tools, which no template of a checkpoint does
    as_sglang = [{**each, "defer_loading": None} for each in tools] if tools else None
    assert plain.json["choices"][0]["prompt_token_ids"] == rendered(as_sglang)


def test_generate_gives_the_same_log_probabilities(engine: SGLangEngine, score: Any) -> None:
    prompt = [9707, 11, 1879, 0]
    params = {"max_new_tokens": 8, "temperature": 1.0}
    body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
    reply = patient(f"{engine.urls[0]}/generate", body).json
    entries = reply["meta_info"]["output_token_logprobs"]
    sampled = [entry[1] for entry in entries]
    assert reply["output_ids"] == sampled
    wanted = score([*prompt, *sampled])[len(prompt) - 1 :]
    assert [entry[0] for entry in entries] == pytest.approx(wanted, abs=1e-4)


def test_weight_versions_are_those_of_the_turns(server: ServerThread, engine: SGLangEngine) -> None:
    talk = Talk(server.url)
    ask(talk, user("one"), **{**SHORT, "regex": "[a-z]{4}"})  # a turn that ends by itself: samples go on behind it
    changed = patient(f"{engine.urls[0]}/update_weight_version", {"new_version": "step-2", "abort_all_requests": False})
    assert changed.status == 200, changed.body
    ask(talk, user("two"), **SHORT)
    (sample,) = talk.samples().samples
    assert sample["weight_versions"] == ["default", "step-2"]
    patient(f"{engine.urls[0]}/update_weight_version", {"new_version": "default", "abort_all_requests": False})


class Turn(threading.Thread):
    """A long turn under way; `answer` once it is over."""

    def __init__(self, talk: Talk) -> None:
        super().__init__()
        self.answer: Answer | None = None
        self._talk = talk
        self.start()

    def run(self) -> None:
        fields = {**SHORT, "max_tokens": 3500, "ignore_eos": True}
        body = {"model": "m", "messages": [user("Tell me a long story.")], **fields}
        self.answer = patient(self._talk.chat_url, body)


def wait_until_it_generates(engine: SGLangEngine) -> None:
    deadline = time.monotonic() + 300
    while not request(f"{engine.urls[0]}/v1/loads", timeout=60).json["loads"][0]["num_running_reqs"]:
        assert time.monotonic() < deadline, "no request runs"
        time.sleep(0.05)


def test_an_aborted_turn_is_answered_and_not_committed(server: ServerThread, engine: SGLangEngine) -> None:
    talk = Talk(server.url)
    turn = Turn(talk)
    wait_until_it_generates(engine)
    request(f"{engine.urls[0]}/abort_request", "POST", {"abort_all": True}, timeout=60)
    turn.join(600)
    assert turn.answer is not None
    assert turn.answer.status == 200
    assert turn.answer.json["choices"][0]["finish_reason"] == "abort"
    assert talk.records == []


def test_a_turn_whose_engine_is_killed_can_be_repeated_on_the_next_one(
    server: ServerThread, engine: SGLangEngine, told: list[str]
) -> None:
    (worker,) = engine.workers
    before = worker.processes()
    scheduler = next(pid for pid in before if b"sglang::scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes())
    talk = Talk(server.url)
    turn = Turn(talk)
    wait_until_it_generates(engine)
    os.kill(scheduler, signal.SIGKILL)
    turn.join(600)
    assert turn.answer is not None
    assert turn.answer.status == 502
    assert engine.urls[0] in turn.answer.error
    assert talk.records == []
    deadline = time.monotonic() + 900
    while not restarted(told):
        assert engine.alive()
        assert time.monotonic() < deadline, told
        time.sleep(0.1)
    assert not any(runs(pid) for pid in before)
    ask(talk, user("Tell me a long story."), **SHORT)
    assert len(talk.records) == 1
    assert any(line.startswith("engine sglang died (") and "The end of " in line for line in told)
