"""Turns: prefixes are kept, suffixes rendered, retries and rollbacks, and what reaches the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helpers.chat_tokenizer import IM_END, NEWLINE, chat_family, decode, encode
from helpers.fake_engine import FakeEngine, refuses, says
from helpers.sessions import CLOCK, WEATHER, Serve, Talk, assistant, request, tool, user
from miles_core.server.app import ServerThread

PROMPT = encode("<|im_start|>assistant\n")


def full(messages: list[Any], tools: Any = None, **kwargs: Any) -> list[int]:
    return encode(chat_family().render(messages, tools, chat_family().merge_kwargs(kwargs), True))


# -- tokens ----------------------------------------------------------------------------------------------------


def test_every_prompt_is_the_full_rendering_and_begins_with_the_checkpoint(talk: Talk, engine: FakeEngine) -> None:
    replies = [
        says("", reasoning="Look.", calls=[("get_weather", '{"city": "Paris"}'), ("get_weather", '{"city": "Oslo"}')]),
        says("Warm.", reasoning="Both."),
        says("You are welcome."),
        says("Bye."),
    ]
    engine.plays(*replies)
    checkpoint: list[int] = []
    for appended in (
        [{"role": "system", "content": "Help."}, user("Weather?")],
        [tool("18"), tool("4")],
        [user("Thanks"), user("a lot")],
        [tool("x"), {"role": "system", "content": "Be brief."}, tool("y"), user("End.")],
    ):
        expected = full([*talk.history, *appended], [WEATHER])
        talk.ask(*appended, tools=[WEATHER])
        sent = engine.turns[-1]["input_ids"]
        assert sent == expected
        assert sent[: len(checkpoint)] == checkpoint
        assert sent[-len(PROMPT) :] == PROMPT
        checkpoint = [*sent, *replies[len(engine.turns) - 1].ids]
    assert talk.metadata["accumulated_token_ids"] == checkpoint
    assert talk.metadata["tito_session_mismatch"] == []


def test_only_the_suffix_is_rendered(talk: Talk, engine: FakeEngine) -> None:
    """Sampled ids that no tokenizer would give stay, and so does the text before them."""
    halves = [*encode("<think>\n\n</think>\n\n"), *encode("H"), *encode("AVING"), IM_END]
    assert encode("HAVING") != [*encode("H"), *encode("AVING")]
    engine.plays(says("HAVING", reasoning="", ids=halves))
    talk.ask(user("one"))
    first = engine.turns[0]["input_ids"]
    talk.ask(user("two"))
    suffix = encode("<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n")
    assert engine.turns[1]["input_ids"] == [*first, *halves, NEWLINE, *suffix]
    assert {m["type"] for m in talk.metadata["tito_session_mismatch"]} == {"assistant_text"}


def test_the_stored_spelling_wins(talk: Talk, engine: FakeEngine) -> None:
    engine.plays(says("", calls=[("get_time", "{}")]))
    talk.ask(user("Time?"), tools=[CLOCK])
    answer = talk.history[-1]
    call = {k: v for k, v in answer["tool_calls"][0].items() if k != "index"}
    replay = {"role": "assistant", "reasoning_content": "Well.", "tool_calls": [call], "extra": 1}
    posted = talk.post([user([{"type": "text", "text": "Time?"}]), replay, tool("9")])
    assert posted.status == 200
    sent = engine.turns[-1]
    assert sent["messages"][0] == user("Time?")
    assert sent["messages"][1] == answer
    assert sent["input_ids"] == full([*talk.history, tool("9")], [CLOCK])


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}])
def test_null_empty_and_missing_content_are_one(talk: Talk, engine: FakeEngine, content: dict[str, Any]) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    talk.ask(user("secret?"), {"role": "assistant", "tool_calls": [call], **content}, tool("42"))
    assert engine.turns[0]["input_ids"] == full([user("secret?"), assistant("", tool_calls=[call]), tool("42")])


def test_a_system_message_in_parts_renders_as_text(talk: Talk, engine: FakeEngine) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    talk.ask({"role": "system", "content": parts}, user(parts), tool(parts))
    assert engine.turns[0]["input_ids"] == full([{"role": "system", "content": "a b"}, user("a b"), tool("a b")])


# -- retries and rollbacks -------------------------------------------------------------------------------------


def test_a_retry_of_the_first_turn_renders_from_scratch(talk: Talk, engine: FakeEngine) -> None:
    engine.plays(says("lost"), says("kept"))
    talk.ask(user("one"))
    talk.history = []
    talk.ask(user("one"))
    assert engine.turns[0]["input_ids"] == engine.turns[1]["input_ids"]
    assert [r["response"]["choices"][0]["message"]["content"] for r in talk.records] == ["kept"]


def test_a_retry_of_a_later_turn_drops_one_generation(talk: Talk, engine: FakeEngine) -> None:
    talk.ask(user("one"))
    first = list(talk.history)
    talk.ask(user("two"))
    talk.history = first
    talk.ask(user("two, again"))
    assert engine.turns[2]["input_ids"] == full([*first, user("two, again")])
    assert len(talk.records) == 2
    talk.ask(user("three"))
    assert len(talk.records) == 3


def test_a_failed_retry_loses_nothing(talk: Talk, engine: FakeEngine) -> None:
    talk.ask(user("one"))
    before = talk.state()
    engine.plays(refuses(500, b'{"message": "out of memory"}'))
    assert talk.post([user("one")]).status == 500
    assert talk.state() == before
    talk.ask(user("two"))
    assert len(talk.records) == 2


def test_resending_exactly_the_stored_history_is_a_turn(talk: Talk, engine: FakeEngine) -> None:
    talk.ask(user("one"))
    talk.ask()
    assert engine.turns[1]["input_ids"] == [
        *engine.turns[0]["input_ids"],
        *talk.records[0]["response"]["choices"][0]["meta_info"]["output_token_logprobs"][0][1:2],
        *engine.turns[1]["input_ids"][len(engine.turns[0]["input_ids"]) + 1 :],
    ]
    assert engine.turns[1]["input_ids"][-len(PROMPT) :] == PROMPT
    assert len(talk.records) == 2


def test_too_deep_a_rollback_is_refused_in_these_words(talk: Talk, engine: FakeEngine) -> None:
    for text in ("one", "two", "three"):
        talk.ask(user(text))
    before = talk.state()
    refused = talk.post([user("one"), assistant("changed"), user("four")])
    assert refused.status == 400
    assert refused.error == (
        "rollback failed: discard_count=3 exceeds max_assistant_rollback_steps=1 "
        "(stored has 6 messages, request has 3 messages)"
    )
    assert talk.state() == before
    assert len(engine.turns) == 3
    talk.ask(user("four"))
    assert len(talk.records) == 4


def test_max_rollback_is_a_setting(serve: Serve, engine: FakeEngine) -> None:
    for allowed, status in ((0, 400), (2, 200)):
        talk = Talk(serve(max_rollback=allowed).url)
        talk.ask(user("one"))
        talk.ask(user("two"))
        assert talk.post([user("other")]).status == status


def test_few_shot_assistants_are_prompt(talk: Talk, engine: FakeEngine) -> None:
    shot = assistant("few-shot")
    talk.ask(user("u0"), shot, user("u1"))
    talk.history = []
    talk.ask(user("u0"), shot, user("u1b"))
    assert engine.turns[1]["input_ids"] == full([user("u0"), shot, user("u1b")])
    assert len(talk.records) == 1
    sample = talk.samples().samples[0]
    assert "few-shot" not in sample["response"]


def test_a_rewritten_answer_is_prompt(talk: Talk, engine: FakeEngine) -> None:
    engine.plays(says("AAA BBB"), says("CCC"))
    talk.ask(user("u1"))
    talk.history = [user("u1"), assistant("AAA")]
    talk.ask(user("u2"))
    assert engine.turns[1]["input_ids"] == full([user("u1"), assistant("AAA"), user("u2")])
    sample = talk.samples().samples[0]
    response = sample["tokens"][-sample["response_length"] :]
    trained = decode([int(i) for i, m in zip(response, sample["loss_mask"], strict=True) if m])
    assert "AAA" not in trained
    assert "CCC" in trained


def test_white_space_counts(talk: Talk, engine: FakeEngine) -> None:
    engine.plays(says("\n\nDone.\n", reasoning="think\n"))
    answer = talk.ask(user("u"))
    assert answer.message["content"] == "\n\nDone.\n"
    stored = list(talk.history)
    talk.ask(user("exact"))
    assert len(talk.records) == 2
    talk.history = stored
    stripped = [user("u"), {**stored[1], "content": "Done."}, user("next")]
    assert talk.post(stripped).status == 400, "two generations would have to go"


# -- settings of a turn ----------------------------------------------------------------------------------------


def test_thinking_off(talk: Talk, engine: FakeEngine) -> None:
    kwargs = {"enable_thinking": False}
    ending = encode("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    engine.plays(says("a", ids=[*encode("a"), IM_END], reasoning=""))
    for text in ("one", "two"):
        talk.ask(user(text), chat_template_kwargs=kwargs)
        assert engine.turns[-1]["input_ids"][-len(ending) :] == ending
        assert engine.turns[-1]["chat_template_kwargs"] == kwargs
    assert engine.turns[1]["input_ids"] == full([user("one"), *talk.history[1:3]], **kwargs)


def test_reasoning_effort_none_turns_thinking_off(talk: Talk, engine: FakeEngine) -> None:
    ending = encode("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    talk.ask(user("one"), reasoning_effort="none")
    assert engine.turns[0]["input_ids"][-len(ending) :] == ending
    assert engine.turns[0]["reasoning_effort"] == "none"
    talk.ask(user("two"), reasoning_effort="high")
    assert engine.turns[1]["input_ids"][-len(PROMPT) :] == PROMPT
    talk.ask(user("three"), reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    assert engine.turns[2]["input_ids"][-len(PROMPT) :] == PROMPT


def test_template_kwargs_of_server_session_and_request_are_merged(serve: Serve, engine: FakeEngine) -> None:
    url = serve(chat_template_kwargs={"enable_thinking": False, "a": 1}).url
    talk = Talk(url, chat_template_kwargs={"a": 2, "b": 2})
    talk.ask(user("one"), chat_template_kwargs={"b": 3, "c": None})
    assert engine.turns[0]["chat_template_kwargs"] == {"enable_thinking": False, "a": 2, "b": 3, "c": None}
    assert decode(engine.turns[0]["input_ids"]).endswith("</think>\n\n")


def test_changed_tools_keep_the_prefix_and_are_told(talk: Talk, engine: FakeEngine) -> None:
    engine.plays(says("", calls=[("get_weather", "{}")]))
    talk.ask(user("u"), tools=[WEATHER])
    assert "tools_changed" not in talk.metadata
    talk.ask(tool("18"), tools=[WEATHER, CLOCK])
    assert talk.metadata["tools_changed"] is True
    assert engine.turns[1]["tools"] == [WEATHER, CLOCK]
    assert engine.turns[1]["input_ids"] == full(talk.history[:-1], [WEATHER])
    talk.ask(user("again"))
    assert engine.turns[2]["input_ids"] == full(talk.history[:-1], [WEATHER])
    assert talk.metadata["tito_session_mismatch"] == []
    assert len(talk.samples().samples) == 1


@pytest.mark.parametrize("none", [None, [], "left out"])
def test_tools_left_out_keep_the_prefix(talk: Talk, engine: FakeEngine, none: Any) -> None:
    talk.ask(user("u"), tools=[WEATHER])
    talk.ask(user("v"), **({} if none == "left out" else {"tools": none}))
    assert engine.turns[1]["input_ids"] == full(talk.history[:-1], [WEATHER])
    assert "tools_changed" not in talk.metadata


def test_changed_tools_can_be_refused(serve: Serve, engine: FakeEngine) -> None:
    talk = Talk(serve(on_tools_change="refuse").url)
    talk.ask(user("u"), tools=[WEATHER])
    before = talk.state()
    refused = talk.post([*talk.history, user("v")], tools=[CLOCK])
    assert refused.status == 400
    assert "tools" in refused.error
    assert talk.state() == before
    talk.ask(user("v"), tools=[WEATHER])


def test_control_tokens_in_text_are_counted(talk: Talk, serve: Serve, engine: FakeEngine) -> None:
    nasty = user("a <|im_end|> b <|im_start|>")
    talk.ask(nasty)
    assert talk.metadata["control_tokens"] == 2
    assert engine.turns[0]["input_ids"] == full([nasty])
    careful = Talk(serve(reject_control_tokens=True).url)
    before = careful.state()
    refused = careful.post([nasty])
    assert refused.status == 400
    assert "2 control tokens" in refused.error
    assert careful.state() == before


# -- what travels on -------------------------------------------------------------------------------------------


def test_unknown_fields_travel_on_and_ours_are_set(talk: Talk, engine: FakeEngine) -> None:
    extra = {
        "top_k": 20,
        "min_p": 0.1,
        "custom_params": {"x": [1, None, True]},
        "regex": "a+",
        "separate_reasoning": False,
        "max_completion_tokens": 7,
        "seed": 3,
        "stop": ["é"],
        "n": 1,
        "temperature": 0,
        "logprobs": False,
        "return_meta_info": False,
        "no_stop_trim": True,
    }
    talk.ask(user("u"), input_ids=[1, 2], rid="mine", logprob_start_len=0, stream=False, **extra)
    sent = engine.turns[0]
    expected = {
        **extra,
        "logprobs": True,
        "return_meta_info": True,
        "no_stop_trim": False,
        "model": "m",
        "messages": [user("u")],
        "input_ids": full([user("u")]),
        "rid": sent["rid"],
    }
    assert sent == expected
    assert sent["rid"] != "mine"
    assert talk.records[0]["request"] == expected
    talk.ask(user("v"))
    assert engine.turns[1]["rid"] != sent["rid"]


@pytest.mark.parametrize("history", ["linear", "tree"])
def test_each_record_has_its_own_fields_spelled_as_they_were_sent(
    serve: Serve, engine: FakeEngine, history: str
) -> None:
    talk = Talk(serve(history=history).url)
    fields = [
        '{"a": true, "b": 1}',
        '{"a": true, "b": 1}',
        '{"a": 1, "b": 1}',
        '{"b": 1, "a": 1}',
        '{"a": 1.0, "b": 1}',
    ]
    for text in fields:
        talk.ask(user("u"), custom_params=json.loads(text), tools=[{**WEATHER, "note": json.loads(text)}])
        told = talk.records[-1]["request"]
        assert json.dumps(told["custom_params"]) == text
        assert json.dumps(told["tools"][0]["note"]) == text
    if history == "linear":
        assert [json.dumps(record["request"]["custom_params"]) for record in talk.records] == fields


def test_every_id_sent_is_a_number(talk: Talk, engine: FakeEngine) -> None:
    talk.ask(user("u"))
    assert all(type(i) is int for i in engine.turns[0]["input_ids"])


def test_headers(talk: Talk, engine: FakeEngine) -> None:
    sent = {
        "X-Trace": "abc",
        "Authorization": "Bearer secret",
        "Api-Key": "secret",
        "X-Api-Key": "secret",
        "Cookie": "secret",
        "Proxy-Authorization": "secret",
        "X-SMG-Routing-Key": "other",
        "Accept-Encoding": "gzip",
    }
    body = {"model": "m", "messages": [user("u")]}
    assert request(talk.chat_url, "POST", body, headers=sent).status == 200
    names = [name.lower() for name, _ in engine.requests[-1].header_lines]
    assert len(names) == len(set(names)), names
    got = {name.lower(): value for name, value in engine.requests[-1].header_lines}
    assert got["x-trace"] == "abc"
    assert got["x-smg-routing-key"] == talk.id
    assert got["host"] == engine.url.removeprefix("http://")
    assert not [k for k, v in got.items() if "secret" in v]
    assert "accept-encoding" not in got or got["accept-encoding"] != "secret"


def test_the_answer_is_the_engines_without_routing_data(talk: Talk, engine: FakeEngine) -> None:
    reply = says(meta={"routed_experts": "AAAA", "indexer_topk": "BBBB", "other": 1})
    engine.plays(reply)
    answer = talk.ask(user("u")).json
    expected = reply.json
    for key in ("routed_experts", "indexer_topk"):
        del expected["choices"][0]["meta_info"][key]
    assert answer == expected
    assert talk.records[0]["response"] == reply.json


@pytest.mark.parametrize("role", [None, "", "missing"])
def test_an_answer_without_a_role_gets_one(talk: Talk, engine: FakeEngine, role: str | None) -> None:
    def change(reply: Any) -> None:
        reply["choices"][0]["message"].pop("role")
        if role != "missing":
            reply["choices"][0]["message"]["role"] = role

    engine.plays(says("hi").with_json(change))
    assert talk.ask(user("u")).message["role"] == "assistant"
    talk.ask(user("v"))
    assert len(talk.records) == 2
    assert talk.metadata["tito_session_mismatch"] == []


def test_records(talk: Talk, engine: FakeEngine) -> None:
    for text in ("one", "two", "three"):
        talk.ask(user(text))
    every = json.loads(talk.state())
    assert every["session_id"] == talk.id
    for number, record in enumerate(every["records"]):
        assert set(record) == {
            "timestamp",
            "request_timestamp",
            "method",
            "path",
            "status_code",
            "request",
            "response",
        }
        assert record["request"] == engine.turns[number]
        assert record["request_timestamp"] <= record["timestamp"]
        assert record["status_code"] == 200
    assert json.loads(talk.state("last"))["records"] == every["records"][-1:]
    assert json.loads(talk.state("none"))["records"] == []
    assert json.loads(talk.state("all")) == every


def test_allowed_paths_reach_the_engine(talk: Talk, engine: FakeEngine) -> None:
    for path in ("v1/models", "tokenize", "detokenize", "health", "model_info", "get_model_info"):
        for method in ("GET", "POST"):
            answer = request(f"{talk.url}/{path}?a=%20b", method, {"x": 1} if method == "POST" else None)
            assert answer.status == 200
            assert answer.json == {"path": f"/{path}", "query": "a=%20b"}
            assert engine.requests[-1].method == method


def test_health_is_stable(session_server: ServerThread, url: str) -> None:
    first, second = request(f"{url}/health").json, request(f"{url}/health").json
    assert first == second == {"status": "ok", "session_server_instance_id": session_server.instance_id}
    assert len(session_server.instance_id) == 32


def test_created(url: str, engine: FakeEngine) -> None:
    for raw in (None, b"", b"{}", b'{"metadata": null}'):
        made = request(f"{url}/sessions", "POST", raw=raw)
        assert made.status == 200
        assert len(made.json["session_id"]) == 32
        assert made.json["base_url"] == f"{url}/sessions/{made.json['session_id']}"
    talk = Talk(url, metadata={"task": 7, "max_trim_tokens": "mine"})
    assert talk.metadata["task"] == 7
    assert talk.metadata["max_trim_tokens"] == 0


def test_public_url(serve: Serve) -> None:
    talk = Talk(serve(public_url="https://public.example/base/").url)
    assert talk.created["base_url"] == f"https://public.example/base/sessions/{talk.id}"


def test_delete(talk: Talk) -> None:
    gone = talk.delete()
    assert (gone.status, gone.body) == (204, b"")
    for answer in (talk.delete(), talk.post([user("u")]), request(talk.url), request(f"{talk.url}/samples", "POST")):
        assert answer.status == 404
        assert answer.error == f"session not found: session_id={talk.id}"


@pytest.mark.parametrize("excess", [1, -10_000])
def test_a_family_that_keeps_what_is_not_there_is_500_and_changes_nothing(
    serve: Serve, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, excess: int
) -> None:
    server = serve()
    talk = Talk(server.url)
    engine.plays(says("One."))
    talk.ask(user("u"))
    before = talk.state()
    monkeypatch.setattr(server.service.family, "join", lambda checkpoint, suffix: (len(checkpoint) + excess, []))
    refused = talk.post([*talk.history, user("v")])
    assert refused.status == 500
    assert "family qwen3 keeps" in refused.error
    assert talk.state() == before
