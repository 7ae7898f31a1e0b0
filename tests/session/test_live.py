"""Streams read from SGLang's saved replies, and in pieces."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from miles_core.engine.events import EventReader
from miles_core.errors import EngineFault, InexactStream
from miles_core.session.deltas import DeltaError, Deltas
from miles_core.session.live import LiveReply, same_token

SAVED: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "sglang_replies.json").read_text("utf-8"))
IDS = {54289: " Objective", 7828: " Bel", 131615: "ผลิตภัณฑ์", 79878: '!("{}",'}
"""What the tokenizer says of the ids in the saved stream."""


def reader(**asked: Any) -> LiveReply:
    return LiveReply(
        engine="http://e", vocab_size=151_936, spell=lambda token: IDS.get(token, "?"), asked=asked, include_usage=True
    )


def fed(reply: LiveReply, lines: list[str]) -> list[bytes]:
    return [data for line in lines for data in reply.take(line.removeprefix("data: ").encode())]


def test_a_saved_stream_is_an_exact_turn() -> None:
    reply, lines = reader(), SAVED["chat_stream_sglext"]["lines"]
    sent = fed(reply, lines)
    assert [f"data: {data.decode()}" for data in sent] == lines[:5], "all before the finish, as it came"
    assert reply.done
    assert [f"data: {data.decode()}" for data in reply.held()] == [lines[5], *lines[7:]]
    generation = reply.generation(("v1",))
    assert list(generation.sampled) == list(IDS)
    assert list(generation.log_probs) == [
        -11.781473159790039, -11.867526054382324, -12.002372741699219, -11.874733924865723,
    ]  # fmt: skip
    assert generation.message == {"role": "assistant", "content": "", "reasoning_content": "".join(IDS.values())}
    assert generation.finish_reason == "length"
    assert generation.meta["finish_reason"] == {"type": "length", "length": 4}
    assert generation.meta["weight_version"] == "v1"
    assert generation.reply["usage"]["prompt_tokens"] == 12


def test_a_saved_stream_without_ids_is_none() -> None:
    reply = reader()
    fed(reply, SAVED["chat_stream_plain"]["lines"])
    with pytest.raises(InexactStream) as raised:
        reply.generation(())
    assert raised.value.message == (
        "the stream of the engine at http://e lacks sglext.output_ids, the ids that were sampled"
    )


def test_the_messages_of_streams_that_do_not_agree() -> None:
    reply, lines = reader(), SAVED["chat_stream_sglext"]["lines"]
    fed(reply, [line.replace("[54289,", "[7828,") for line in lines])
    with pytest.raises(InexactStream) as raised:
        reply.generation(())
    assert raised.value.message == (
        "the stream of the engine at http://e has the log-probability of ' Objective' for sampled token 0, whose id "
        "7828 is ' Bel'"
    )
    reply = reader()
    fed(reply, [line.replace("[54289,", "[") for line in lines])
    with pytest.raises(InexactStream) as raised:
        reply.generation(())
    assert raised.value.message == (
        "the stream of the engine at http://e has 4 log-probabilities for 3 sampled tokens; SGLang leaves some out "
        "unless --reasoning-parser or --tool-call-parser is set"
    )


@pytest.mark.parametrize("asked", [True, False])
def test_an_extension_beside_a_delta_is_shown_to_those_who_asked(asked: bool) -> None:
    reply = reader(return_output_ids_in_sglext=asked)
    extension = {"output_ids": [[7828]], "routed_experts": "AAAA"}
    (sent,) = reply.take(
        json.dumps({"choices": [{"index": 0, "delta": {"content": "x"}}], "sglext": extension}).encode()
    )
    assert json.loads(sent).get("sglext") == ({"output_ids": [[7828]]} if asked else None)


@pytest.mark.parametrize(
    ("fault", "message", "status", "kind"),
    [
        ({"error": {"message": "m", "type": "T", "code": 503}}, "the engine failed: m", 503, "T"),
        ({"object": "error", "message": "m", "code": 400}, "the engine failed: m", 400, "engine_error"),
        ({"error": "m"}, "the engine failed: m", 502, "engine_error"),
        ({"error": {"message": "m", "code": 7}}, "the engine failed: m", 502, "engine_error"),
    ],
)
def test_faults_of_the_engine(fault: Any, message: str, status: int, kind: str) -> None:
    with pytest.raises(EngineFault) as raised:
        reader().take(json.dumps(fault).encode())
    assert (raised.value.message, raised.value.status, raised.value.type) == (message, status, kind)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_events_do_not_depend_on_how_their_bytes_are_split(end: bytes) -> None:
    lines = [
        b": hi",
        b"data: a",
        b"",
        b"id: 3",
        b"event: x",
        b"data:b",
        b"data:  c",
        b"",
        b"",
        b"data: [DONE]",
        b"",
        b"",
    ]
    raw = end.join(lines)
    for size in range(1, len(raw) + 1):
        events = EventReader()
        found = [e for at in range(0, len(raw), size) for e in events.feed(raw[at : at + size])]
        assert found == [b"a", b"b\n c", b"[DONE]"], size


def test_a_long_event_costs_what_its_length_does() -> None:
    """Rows of experts come in one line of many megabytes."""

    def seconds(pieces: int) -> float:
        events, piece = EventReader(), b"x" * 2**16
        began = time.process_time()
        found = [one for data in (b"data: ", *[piece] * pieces, b"\n\n") for one in events.feed(data)]
        assert list(map(len, found)) == [pieces * 2**16]
        return time.process_time() - began

    assert min(seconds(512) for _ in range(3)) < 40 * min(seconds(64) for _ in range(3))


def test_the_rest_of_a_stream_that_breaks_off_is_no_event() -> None:
    assert EventReader().feed(b"data: a\n") == []


def test_deltas_add_up_to_a_message() -> None:
    deltas = Deltas()
    for delta in (
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Hm"},
        {"reasoning_content": ".", "content": None, "refusal": "n"},
        {"content": "A", "refusal": "o"},
        {"tool_calls": [{"id": "x", "index": 0, "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"id": None, "index": 0, "function": {"name": None, "arguments": "{}"}}]},
        {"tool_calls": [{"id": "y", "index": 1, "function": {"name": "g"}}]},
    ):
        deltas.add(delta)
    assert deltas.message() == {
        "role": "assistant",
        "content": "A",
        "reasoning_content": "Hm.",
        "refusal": "no",
        "tool_calls": [
            {"index": 0, "type": "function", "function": {"name": "f", "arguments": "{}"}, "id": "x"},
            {"index": 1, "type": "function", "function": {"name": "g", "arguments": ""}, "id": "y"},
        ],
    }


@pytest.mark.parametrize("part", [{"index": -1}, {"index": True}, {"index": "0"}, {"index": 0, "function": 3}])
def test_calls_that_no_client_could_read(part: Any) -> None:
    with pytest.raises(DeltaError):
        Deltas().add({"tool_calls": [part]})


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [(" a", " a", True), ("a", " a", True), ("\ufffd", "x", True), (" a", " b", False), ("", "a", False)],
)
def test_spellings_of_one_token(ours: str, theirs: str, same: bool) -> None:
    assert same_token(ours, theirs) is same
