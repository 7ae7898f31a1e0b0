"""The fakes that plugins' tests use: engine, session server, tokenizer and checkpoint, of any family."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from helpers.sessions import Talk, assistant, user
from helpers.streams import added_up
from miles_core.plugins import Registry
from miles_core.server.app import ServerThread
from miles_core.server.settings import ServerSettings
from miles_core.session import wire
from miles_core.testing import FakeEngine, FakeSessions, byte_tokenizer, tokenizer_for, write_checkpoint
from miles_core.testing.fake_engine import Gate, fake_engine, refuses, sampled
from miles_core.testing.fake_sessions import call, say, serving_in_thread
from miles_core.testing.fake_tokenizer import chatml
from miles_core.tito import load_chat_template, load_tokenizer
from miles_tito_families import inkling, kimi26, qwen3

CALLS = [("look_up", '{"title": "Emma"}')]


def post(url: str, body: Any = None) -> Any:
    data = json.dumps(body or {}).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as response:
        raw = response.read()
    return json.loads(raw) if response.headers.get_content_type() == "application/json" else raw


# -- tokenizer and checkpoint -----------------------------------------------------------------------------------


def test_a_byte_tokenizer_has_a_token_per_byte_and_the_control_tokens() -> None:
    tokenizer = byte_tokenizer(["<s>"], ["<t>"])
    ids = tokenizer.encode("<s>é<t>")
    assert len(ids) == 4
    assert tokenizer.decode(ids) == "<s>é<t>"
    assert [i in tokenizer.special_ids for i in ids] == [True, False, False, False]


def test_a_family_that_asks_for_more_tokens_when_it_is_bound_gets_them() -> None:
    bound = inkling.FAMILY.bind(tokenizer_for(inkling.FAMILY))
    assert "What?" in bound.render([user("What?")])


def test_a_checkpoint_of_a_family_is_one_that_commands_read(tmp_path: Path) -> None:
    made = write_checkpoint(tmp_path / "c", qwen3.FAMILY, chat_template="{{ messages }}", config={"model_type": "q"})
    assert made == tmp_path / "c"
    tokenizer = load_tokenizer(made)
    text = "<|im_start|>a<think>"
    assert tokenizer.encode(text) == tokenizer_for(qwen3.FAMILY).encode(text)
    assert (tokenizer.vocab_size, tokenizer.config["model_type"]) == (tokenizer_for(qwen3.FAMILY).vocab_size, "q")
    assert load_chat_template(made) == "{{ messages }}"


# -- engine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [qwen3.FAMILY, kimi26.FAMILY], ids=lambda family: family.name)
def test_what_is_sampled_for_a_message_is_read_as_that_message(family: Any) -> None:
    bound = family.bind(tokenizer_for(family))
    message = assistant("I look.", reasoning_content="Where?")
    message["tool_calls"] = [
        {"id": "functions.look_up:0", "type": "function", "function": {"name": "look_up", "arguments": CALLS[0][1]}}
    ]
    parsed = bound.parse(sampled(bound, message), None)
    assert (parsed["content"], parsed["reasoning_content"]) == ("I look.", "Where?")
    (found,) = parsed["tool_calls"]
    assert (found["function"]["name"], json.loads(found["function"]["arguments"])) == ("look_up", {"title": "Emma"})


def test_a_message_that_a_format_cannot_say_is_refused() -> None:
    with pytest.raises(ValueError, match=r"does not write .* behind its generation prompt"):
        sampled(chatml(), {"role": "user", "content": "I am no assistant."})


def test_a_real_session_server_takes_a_turn_with_the_ids_of_a_family(tmp_path: Path) -> None:
    bound = qwen3.FAMILY.bind(tokenizer_for(qwen3.FAMILY))
    checkpoint = write_checkpoint(tmp_path, qwen3.FAMILY)
    with fake_engine(bound) as engine:
        settings = ServerSettings(checkpoint=str(checkpoint), tito_model="qwen3", engine_urls=(engine.url,))
        with ServerThread(settings, Registry.discover()) as server:
            talk = Talk(server.url)
            engine.plays(engine.says("I look.", reasoning="Where?", calls=CALLS), engine.says("On shelf 12."))
            first = talk.ask(user("Where is Emma?"))
            assert first.status == 200
            talk.ask(user("Where is Emma?"), first.message, {"role": "tool", "tool_call_id": "c", "content": "12"})
            assert talk.metadata["tito_session_mismatch"] == []
        asked, again = (request["input_ids"] for request in engine.turns)
    assert again[: len(asked)] == asked
    assert bound.tokenizer.decode(again[len(asked) :]).startswith("<think>\nWhere?\n</think>\n\nI look.\n<tool_call>")


def test_the_engine_plays_its_script_and_then_the_same_over_and_over() -> None:
    with fake_engine() as engine:
        engine.plays(refuses(503, b'{"error": "busy"}'), lambda body: engine.says(f"You said {body['x']}."))
        with pytest.raises(urllib.error.HTTPError) as caught:
            post(f"{engine.url}/v1/chat/completions", {"x": 1})
        caught.value.close()
        answers = [post(f"{engine.url}/v1/chat/completions", {"x": n}) for n in (2, 3)]
        assert [a["choices"][0]["message"]["content"] for a in answers] == ["You said 2.", "Fine."]
        assert [turn["x"] for turn in engine.turns] == [1, 2, 3]
        with pytest.raises(TimeoutError, match=r"not within 0\.01 s"):
            engine.wait_for(lambda: False, 0.01)
        engine.reset()
        assert engine.turns == []


def test_the_engine_is_a_command_too() -> None:
    with fake_engine() as other:
        port = other.port
    process = subprocess.Popen([sys.executable, "-m", "miles_core.testing.fake_engine", "--port", str(port)])
    try:
        answer = None
        deadline = time.monotonic() + 30
        while answer is None and time.monotonic() < deadline:
            try:
                answer = post(f"http://127.0.0.1:{port}/v1/chat/completions")
            except OSError:
                assert process.poll() is None
                time.sleep(0.02)
        assert answer is not None
        assert answer["choices"][0]["meta_info"]["completion_tokens"] == len(b"Fine.") + 1
    finally:
        process.terminate()
        process.wait(10)


def test_a_port_that_is_taken_is_told() -> None:
    with fake_engine() as engine:
        second = FakeEngine(port=engine.port)
        with pytest.raises(OSError, match="address already in use"):
            second.start()


def test_the_engine_streams_its_answers_as_sglang_does() -> None:
    with fake_engine(qwen3.FAMILY.bind(tokenizer_for(qwen3.FAMILY))) as engine:
        reply = engine.says("Äpfel.", reasoning="Hm.", calls=CALLS)
        gate = Gate()
        reply.edit = lambda events: [*events[:2], gate, *events[2:]]
        gate.open()
        engine.plays(reply)
        asked = {"stream": True, "logprobs": True, "return_output_ids_in_sglext": True}
        sent = post(f"{engine.url}/v1/chat/completions", {**asked, "stream_options": {"include_usage": True}})
        *events, done = [line for line in sent.decode().split("\n\n") if line]
        assert done == "data: [DONE]"
        chunks = [json.loads(event.removeprefix("data: ")) for event in events]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert added_up(chunks)["tool_calls"][0]["function"] == {"name": CALLS[0][0], "arguments": CALLS[0][1]}
        log_probs = [e["logprob"] for c in choices for e in (c["logprobs"] or {"content": []})["content"]]
        assert log_probs == reply.log_probs
        assert chunks[-2]["sglext"]["output_ids"] == [reply.ids]
        assert chunks[-1]["usage"]["completion_tokens"] == len(reply.ids)
        with pytest.raises(urllib.error.HTTPError, match="400"):
            post(f"{engine.url}/v1/chat/completions", {"stream": True, "return_meta_info": True})


# -- session server ---------------------------------------------------------------------------------------------


def test_each_session_gets_the_answers_in_order_and_the_last_one_again() -> None:
    fake = FakeSessions([call("add", '{"a": 1}'), say("3"), 429])
    with serving_in_thread(fake) as url:
        for _ in range(2):
            base = post(f"{url}/sessions")["base_url"]
            turns = [post(f"{base}/v1/chat/completions", {"n": n})["choices"][0]["message"] for n in range(2)]
            assert turns[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
            assert turns[1] == {"role": "assistant", "content": "3"}
            for _ in range(2):
                with pytest.raises(urllib.error.HTTPError, match="429") as caught:
                    post(f"{base}/v1/chat/completions")
                caught.value.close()
            reply = wire.decode(post(f"{base}/samples"))
            assert reply.samples[0]["weight_versions"] == ["v1", "v1"]
    assert [request.get("n") for request in fake.requests] == [0, 1, None, None] * 2


def test_without_a_script_every_answer_is_the_same() -> None:
    fake = FakeSessions()
    with serving_in_thread(fake) as url:
        base = post(f"{url}/sessions")["base_url"]
        assert post(f"{base}/v1/chat/completions")["choices"][0]["message"] == say("Fine.")


def test_public_names_are_there() -> None:
    import miles_core.testing

    assert all(getattr(miles_core.testing, name) for name in miles_core.testing.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        miles_core.testing.nothing  # noqa: B018
