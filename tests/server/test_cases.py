"""Inputs that have broken programs of this kind, by their names in the collection they come from, in both modes.

Each is the smallest form of its fault; the whole kind is tested where the kind belongs (`test_matchers`,
`test_samples`, `test_routing_replay`, `test_errors`, `test_hostile`, `test_headers`, `test_stream`, `test_disconnect`).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest

from helpers.chat_tokenizer import chat_family, decode, encode, write_checkpoint
from helpers.fake_engine import FakeEngine, Reply, refuses, says
from helpers.sessions import CLOCK, WEATHER, Answer, Json, Serve, Talk, assistant, request, tool, user
from miles_core.session import wire

LAYERS, TOPK = 2, 2
CALLS = [("get_weather", '{"city": "Paris"}'), ("get_weather", '{"city": "Oslo"}')]


@dataclass
class Place:
    """Where a case is played: a way to open sessions in one mode, and the engine behind them."""

    serve: Serve
    engine: FakeEngine
    history: str
    checkpoint: Path

    @property
    def tree(self) -> bool:
        return self.history == "tree"

    def talk(self, **settings: Any) -> Talk:
        return Talk(self.serve(history=self.history, **settings).url)

    def prompt(self, at: int) -> list[int]:
        """The ids of a turn's prompt, counted from the session's first turn."""
        found: list[int] = self.engine.turns[at]["input_ids"]
        return found

    def parents(self, talk: Talk) -> list[int | None]:
        return [node["parent"] for node in talk.metadata["tree"]["nodes"]]


def whole(messages: list[Any], tools: Any = None) -> list[int]:
    return encode(chat_family().render(messages, tools, chat_family().merge_kwargs(), True))


def trained(sample: Json) -> str:
    """The text of what a sample trains on."""
    response = sample["tokens"][-sample["response_length"] :]
    return decode(response[sample["loss_mask"] == 1].tolist())


def samples(talk: Talk, **body: Any) -> wire.SamplesReply:
    answer = request(f"{talk.url}/samples", "POST", body)
    assert answer.status == 200, answer.body
    return wire.decode(answer.body)


# -- histories ---------------------------------------------------------------------------------------------------------


def sh_02_an_answer_the_client_never_got(at: Place) -> None:
    talk = at.talk()
    at.engine.plays(says("Lost."), says("Got."), says("Lost too."), says("Got too."))
    talk.post([user("u1")])
    talk.ask(user("u1"))
    assert at.prompt(0) == at.prompt(1)
    talk.post([*talk.history, tool("t1")])
    talk.ask(tool("t1"))
    assert at.prompt(2) == at.prompt(3)
    if at.tree:
        assert at.parents(talk) == [None, None, 1, 1]
        assert [s["metadata"]["leaf"]["node_id"] for s in talk.samples().samples] == [3, 0]
    else:
        assert len(talk.records) == 2
    text = trained(talk.samples().samples[0])
    assert ("Got." in text, "Got too." in text, "Lost" in text) == (True, True, False)


def sh_03_a_history_that_diverges_too_far_back(at: Place) -> None:
    talk = at.talk()
    for message in (user("u1"), tool("t1"), tool("t2")):
        talk.ask(message)
    before = talk.state()
    other = talk.post([user("u1"), assistant("changed"), tool("t1")])
    if at.tree:
        assert other.status == 200
        assert at.parents(talk) == [None, 0, 1, None]
    else:
        assert other.status == 400
        assert "discard_count=3" in other.error
        assert "(stored has 6 messages, request has 3 messages)" in other.error
        assert talk.state() == before
    talk.ask(tool("t3"))
    assert at.prompt(-1)[: len(at.prompt(2))] == at.prompt(2)


def sh_06_an_answer_that_its_agent_rewrites(at: Place) -> None:
    talk = at.talk()
    at.engine.plays(says("AAA BBB"), says("CCC"))
    talk.ask(user("u1"))
    rewritten = [user("u1"), assistant("AAA"), tool("t")]
    assert talk.post(rewritten).status == 200
    assert at.prompt(1) == whole(rewritten)
    texts = [trained(sample) for sample in talk.samples().samples]
    assert [("AAA" in text, "BBB" in text, "CCC" in text) for text in texts] == (
        [(False, False, True), (True, True, False)] if at.tree else [(False, False, True)]
    )


def sh_08_tools_that_change_in_the_middle(at: Place) -> None:
    talk = at.talk()
    at.engine.plays(says("", calls=CALLS[:1]), says("One."), says("Two."))
    talk.ask(user("u"), tools=[WEATHER])
    talk.ask(tool("t1"), tools=[WEATHER, CLOCK])
    told = whole(talk.history[:-1], [WEATHER, CLOCK] if at.tree else [WEATHER])
    assert at.prompt(1) == told
    talk.ask(user("v"))
    assert at.prompt(2) == whole(talk.history[:-1], [WEATHER, CLOCK] if at.tree else [WEATHER])
    metadata = talk.metadata
    assert metadata["tito_session_mismatch"] == []
    if at.tree:
        assert at.parents(talk) == [None, None, 1]
        assert len(talk.samples().samples) == 2
    else:
        assert metadata["tools_changed"] is True
        assert len(talk.samples().samples) == 1


def sh_10_assistant_messages_of_the_client(at: Place) -> None:
    call = {"id": "c0", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    for shot in (assistant("few-shot"), assistant("few-shot", tool_calls=[call])):
        talk, seen = at.talk(), len(at.engine.turns)
        talk.ask(user("u0"), shot, user("u1"))
        retry = [user("u0"), shot, user("u1b")]
        assert talk.post(retry).status == 200
        assert at.prompt(seen + 1) == whole(retry)
        compacted = [user("u0"), assistant("summary"), user("u2")]
        assert talk.post(compacted).status == 200
        for sample in talk.samples().samples:
            assert "few-shot" not in trained(sample)
            assert "summary" not in trained(sample)
        if at.tree:
            assert at.parents(talk) == [None, None, None]
            assert len(talk.samples().samples) == 3


# -- what comes back ---------------------------------------------------------------------------------------------------


def replayed(at: Place, talk: Talk, change: Callable[[Json], Json], *more: Json) -> bool:
    """Send the stored answer back changed; whether it was recognised."""
    first = len(at.engine.turns) - 1
    checkpoint = [*at.prompt(first), *talk_ids(talk)]
    answer = talk.post([*talk.history[:-1], change(json.loads(json.dumps(talk.history[-1]))), *more])
    assert answer.status == 200, answer.body
    return at.prompt(first + 1)[: len(checkpoint)] == checkpoint


def talk_ids(talk: Talk) -> list[int]:
    """What the engine sampled last."""
    meta = talk.records[-1]["response"]["choices"][0]["meta_info"]
    return [entry[1] for entry in meta["output_token_logprobs"]]


def mr_01_arguments_written_again(at: Place) -> None:
    for matcher, recognised in (("strict", False), ("loose_tool_call", True), ("role_content_only", True)):
        for arguments in ('{ "b": {"y": 3, "x": 2}, "a": 1 }', {"b": {"y": 3, "x": 2}, "a": 1}):
            talk = at.talk(message_matcher=matcher)
            at.engine.plays(says("", calls=[("f", '{"a":1,"b":{"x":2,"y":3}}')]))
            talk.ask(user("u"))

            def change(message: Json, arguments: Json = arguments) -> Json:
                message["tool_calls"][0]["function"]["arguments"] = arguments
                return message

            assert replayed(at, talk, change, tool("t")) is recognised, (matcher, arguments)


def mr_04_a_call_without_content(at: Place) -> None:
    firsts = []
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for content in ({"content": None}, {"content": ""}, {}):
        talk = at.talk()
        at.engine.plays(says("", calls=[("f", "{}")]))
        talk.ask(user("secret?"))
        shown = {k: v for k, v in talk.history[-1].items() if k != "content"}
        assert replayed(at, talk, lambda _, told={**shown, **content}: told, tool("42"))
        other = at.talk()
        other.ask(user("secret?"), {"role": "assistant", "tool_calls": [call], **content}, tool("42"))
        firsts.append(at.prompt(-1))
    assert firsts[0] == firsts[1] == firsts[2]


def mr_06_reasoning_left_out(at: Place) -> None:
    for matcher, recognised in (("strict", False), ("loose_tool_call", False), ("role_content_only", True)):
        talk = at.talk(message_matcher=matcher)
        at.engine.plays(says("345", reasoning="multiply"))
        talk.ask(user("15 * 23?"))
        assert replayed(at, talk, lambda _: assistant("345"), user("sure?")) is recognised, matcher
        assert ("multiply" in decode(at.prompt(-1))) is recognised
        found = talk.samples().samples
        assert len(found) == (2 if at.tree and not recognised else 1)
        assert any("multiply" in trained(sample) for sample in found) is (recognised or at.tree)
        if not at.tree:
            assert talk.metadata.get("diverged", {}).get("keys") == (None if recognised else ["reasoning_content"])


def mr_07_parallel_calls_in_a_stream(at: Place) -> None:
    talk = at.talk()
    at.engine.plays(says("", calls=CALLS))
    with openai.OpenAI(base_url=f"{talk.url}/v1", api_key="none", max_retries=0) as api:
        asked: Any = [user("u")]
        with api.chat.completions.stream(model="m", messages=asked, tools=[WEATHER]) as stream:  # type: ignore[list-item]
            chunks = [event.chunk for event in stream if event.type == "chunk"]
            message = stream.get_final_completion().choices[0].message
    indices = [c.index for chunk in chunks for choice in chunk.choices for c in choice.delta.tool_calls or []]
    assert indices == [0, 1]
    assert [(c.function.name, c.function.arguments) for c in message.tool_calls or []] == CALLS
    talk.history = [user("u"), talk.records[0]["response"]["choices"][0]["message"]]
    told = message.model_dump(exclude={"parsed"}, exclude_none=True)
    for one in told["tool_calls"]:
        one["function"].pop("parsed_arguments", None)
    assert replayed(at, talk, lambda _: told, tool("1"), tool("2"))


def mr_11_white_space_around_an_answer(at: Place) -> None:
    for exact in (True, False):
        talk = at.talk()
        at.engine.plays(says("\n\nDone.\n", reasoning="think\n"))
        assert talk.ask(user("u")).message["content"] == "\n\nDone.\n"
        stripped = {"reasoning_content": "think\n", "role": "assistant", "content": "Done."}
        assert replayed(at, talk, lambda told, other=None if exact else stripped: other or told, user("v")) is exact
        assert {m["type"] for m in talk.metadata["tito_session_mismatch"]} <= {"assistant_text"}


# -- samples -----------------------------------------------------------------------------------------------------------


def with_rows(text: str) -> Callable[[Json], Reply]:
    """A reply with the rows its request asks for, each filled with its own number."""

    def answer(body: Json) -> Reply:
        reply = says(text)
        start, stop = body.get("routed_experts_start_len", 0), len(body["input_ids"]) + len(reply.ids) - 1
        values = np.repeat(np.arange(start, stop, dtype="<i4"), LAYERS * TOPK).tobytes()
        rows = {"routed_experts": base64.b64encode(values).decode()}
        return reply.with_json(lambda data: data["choices"][0]["meta_info"].update(rows))

    return answer


def check_rows(sample: Json) -> None:
    rows = sample["rollout_routed_experts"]
    assert rows.shape == (len(sample["tokens"]) - 1, LAYERS, TOPK)
    assert (rows == np.arange(len(rows), dtype=np.int32)[:, None, None]).all()


def sa_01_experts_are_cut_with_the_rest(at: Place) -> None:
    talk = at.talk(checkpoint=str(at.checkpoint), routing_replay=True)
    at.engine.plays(with_rows("One."), with_rows("Two."))
    ends = []
    for text in ("u", "v"):
        talk.ask(user(text))
        ends.append(len(talk.metadata["accumulated_token_ids"]))
    prompt = len(at.prompt(0))
    for limit in range(1, ends[-1] + 2):
        reply = samples(talk, max_seq_len=limit)
        if limit <= prompt:
            assert (reply.samples, reply.empty_reason) == ([], "all_truncated")
            continue
        (sample,) = reply.samples
        check_rows(sample)
        assert len(sample["tokens"]) <= limit
        assert (sample["status"] == "completed") is (len(sample["tokens"]) in ends)


def sa_03_tokens_nobody_sampled(at: Place) -> None:
    talk = at.talk()
    body = encode("<think>\nHm.\n</think>\n\nYes")
    first, second = says("Yes", ids=body), says("No")
    at.engine.plays(first, second)
    talk.ask(user("u"))
    talk.ask(user("v"))
    (sample,) = talk.samples().samples
    pairs = {len(at.prompt(0)) + n: pair for n, pair in enumerate(zip(first.ids, first.log_probs, strict=True))}
    pairs |= {len(at.prompt(1)) + n: pair for n, pair in enumerate(zip(second.ids, second.log_probs, strict=True))}
    front = len(sample["tokens"]) - sample["response_length"]
    found = {
        front + n: (int(sample["tokens"][front + n]), float(sample["rollout_log_probs"][n]))
        for n in np.flatnonzero(sample["loss_mask"])
    }
    assert found == pairs


def sa_07_a_tool_result_that_is_too_long(at: Place) -> None:
    talk = at.talk()
    talk.ask(user("u"))
    talk.ask(tool("short"))
    before = talk.state()
    told = b'{"object":"error","message":"longer than the model\'s context length","code":400}'
    at.engine.plays(refuses(400, told))
    refused = talk.post([*talk.history, tool("x" * 50_000)])
    assert (refused.status, refused.body) == (400, told)
    assert talk.state() == before
    assert len(talk.samples().samples[0]["weight_versions"]) == 2
    talk.ask(tool("shorter"))


def sa_09_where_a_turn_s_experts_begin(at: Place) -> None:
    talk = at.talk(
        checkpoint=str(at.checkpoint), routing_replay=True, incremental_replay=True,
        **({"pick_samples": "helpers.sample_hooks.pick_all"} if at.tree else {}),
    )  # fmt: skip
    replies = [with_rows(text) for text in ("One.", "Two, lost.", "Two.", "Three.")]
    at.engine.plays(*replies)
    talk.ask(user("a"))
    stem, first = list(talk.history), talk.metadata["accumulated_token_ids"]
    talk.ask(user("b"))
    talk.history = stem
    talk.ask(user("b"))
    second = talk.metadata["accumulated_token_ids"]
    talk.ask(user("c"))
    starts = [turn["routed_experts_start_len"] for turn in at.engine.turns]
    assert starts == [0, len(first) - 1, len(first) - 1, len(second) - 1]
    for sample in talk.samples().samples:
        check_rows(sample)
    bad = says("Four.")
    at.engine.plays(bad.with_json(lambda data: data["choices"][0]["meta_info"].update(routed_experts="AAAAAA==")))
    talk.ask(user("d"))
    refused = request(f"{talk.url}/samples", "POST", {})
    assert refused.status == 422
    assert "turn 3: routed_experts has 1 values, which do not make" in refused.error


# -- the engine, and HTTP ----------------------------------------------------------------------------------------------


def unharmed(talk: Talk, before: bytes) -> None:
    """Nothing was stored, everything can be read, and the next turn works."""
    assert talk.state() == before
    assert request(f"{talk.url}/samples", "POST").status == 200
    talk.ask(user("again"))


def ur_01_log_probs_that_are_no_numbers(at: Place) -> None:
    for bad in (
        b"[[NaN, 5, null], [-",
        b"[[-Infinity, 6, null], [-",
        b"[[null, 5, null], [-",
        b"[[1e999, 5, null], [-",
    ):
        talk = at.talk()
        talk.ask(user("u"))
        before = talk.state()
        at.engine.plays(Reply(body=says().body.replace(b"[[-", bad, 1)))
        assert talk.post([*talk.history, user("v")]).status == 502
        unharmed(talk, before)


def ur_05_fields_of_extra_body(at: Place) -> None:
    extra = {"top_k": 20, "min_p": 0.1, "custom_params": {"x": 1}, "regex": "a+", "separate_reasoning": False}
    talk = at.talk()
    with openai.OpenAI(base_url=f"{talk.url}/v1", api_key="none", max_retries=0) as api:
        asked: Any = [user("u")]
        api.chat.completions.create(
            model="m", messages=asked, max_completion_tokens=9, seed=3, stop=["x"], n=1, extra_body=extra
        )
        before = talk.state()
        with pytest.raises(openai.BadRequestError) as refused:
            api.chat.completions.create(model="m", messages=asked, n=2)
        assert "n=2" in str(refused.value.body)
    assert talk.state() == before
    (sent,) = at.engine.turns
    told = {**extra, "max_completion_tokens": 9, "seed": 3, "stop": ["x"], "n": 1, "model": "m", "messages": asked}
    assert {key: sent.get(key) for key in told} == told


async def hp_01_headers_that_two_servers_write(at: Place) -> None:
    talk = at.talk()
    both = (("Server", "uvicorn"), ("Date", "Mon, 01 Jan 2024 00:00:00 GMT"))
    good = says()
    good.headers = (*good.headers, *both)
    at.engine.plays(good, refuses(400, b"{}", *both))
    async with aiohttp.ClientSession() as client:
        for _ in range(2):
            async with client.post(talk.chat_url, json={"messages": [user("u")]}) as answer:
                await answer.read()
                for name in ("server", "date", "content-type", "content-length"):
                    assert len(answer.headers.getall(name)) == 1, name
        async with client.get(f"{talk.url}/v1/models") as answer:
            assert answer.status == 200


def hp_06_half_a_character(at: Place) -> None:
    talk = at.talk()
    talk.ask(user("u"))
    before = talk.state()
    front = json.dumps({"messages": talk.history}).encode()[:-2]
    half = b'"half \\ud83d end"'
    call = b'{"id":"1","type":"function","function":{"name":"f","arguments":' + half + b"}}"
    for message in (
        b'{"role":"user","content":' + half + b"}",
        b'{"role":"tool","tool_call_id":"1","content":' + half + b"}",
        b'{"role":"assistant","content":"","tool_calls":[' + call + b"]}",
    ):
        assert talk.post_raw(front + b"," + message + b"]}").status == 400
    at.engine.plays(says("half \ufffd end"))
    unharmed(talk, before)


def hp_07_errors_of_a_stream(at: Place) -> None:
    page = refuses(503, b"<html>down</html>", kind="text/html")
    busy = refuses(429, b'{"error": "busy"}', ("Retry-After", "7"))
    cut = Reply(body=says().body, cut=20)
    for stream in (False, True):
        faults: list[tuple[list[Reply], int, str]] = [
            ([page], 503, "text/html"), ([busy], 429, "application/json"),
            ([Reply(body=b"<html>")], 502, "application/json"), ([cut, cut], 502, "application/json"),
        ]  # fmt: skip
        for replies, status, kind in faults:
            talk = at.talk()
            talk.ask(user("u"))
            before = talk.state()
            at.engine.plays(*replies)
            answer: Answer = talk.post([*talk.history, user("v")], stream=stream)
            assert answer.status == status
            assert (answer.header("content-type") or "").split(";")[0] == kind
            assert answer.header("retry-after") == ("7" if status == 429 else None)
            unharmed(talk, before)


CASES = {
    "SH-02": sh_02_an_answer_the_client_never_got,
    "SH-03": sh_03_a_history_that_diverges_too_far_back,
    "SH-06": sh_06_an_answer_that_its_agent_rewrites,
    "SH-08": sh_08_tools_that_change_in_the_middle,
    "SH-10": sh_10_assistant_messages_of_the_client,
    "MR-01": mr_01_arguments_written_again,
    "MR-04": mr_04_a_call_without_content,
    "MR-06": mr_06_reasoning_left_out,
    "MR-07": mr_07_parallel_calls_in_a_stream,
    "MR-11": mr_11_white_space_around_an_answer,
    "SA-01": sa_01_experts_are_cut_with_the_rest,
    "SA-03": sa_03_tokens_nobody_sampled,
    "SA-07": sa_07_a_tool_result_that_is_too_long,
    "SA-09": sa_09_where_a_turn_s_experts_begin,
    "UR-01": ur_01_log_probs_that_are_no_numbers,
    "UR-05": ur_05_fields_of_extra_body,
    "HP-01": hp_01_headers_that_two_servers_write,
    "HP-06": hp_06_half_a_character,
    "HP-07": hp_07_errors_of_a_stream,
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("history", ["linear", "tree"])
async def test_case(serve: Serve, engine: FakeEngine, tmp_path: Path, history: str, case: str) -> None:
    checkpoint = write_checkpoint(tmp_path / "moe")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "num_hidden_layers": LAYERS}))
    result = CASES[case](Place(serve, engine, history, checkpoint))
    if result is not None:
        await result
