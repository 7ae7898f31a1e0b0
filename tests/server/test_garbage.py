"""What a turn leaves behind: nothing that only the search for cycles finds, which would keep bodies until then."""

from __future__ import annotations

import gc
import http.client
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from helpers.sessions import Serve
from miles_core.server.app import ServerThread

TURNS = 100
"""A connection to the engine that is opened anew in between leaves some twenty objects."""


@contextmanager
def kept_garbage() -> Iterator[list[Any]]:
    """Unreachable objects that the block left; they are let go at its end."""
    gc.collect()
    gc.disable()
    found: list[Any] = []
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def converse(server: ServerThread, turns: int, *, stream: bool) -> None:
    """One conversation over a connection of its own, all of its life."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)

    def send(method: str, path: str, value: Any = None) -> bytes:
        body = json.dumps(value).encode() if value is not None else None
        connection.request(method, path, body, {"content-type": "application/json"})
        raw = connection.getresponse().read()
        assert b'"error"' not in raw, raw
        return raw

    session = json.loads(send("POST", "/sessions", {}))["session_id"]
    messages: list[Any] = []
    for number in range(turns):
        messages.append({"role": "user", "content": f"Turn {number}."})
        send("POST", f"/sessions/{session}/v1/chat/completions", {"messages": messages, "stream": stream})
        messages.append({"role": "assistant", "content": "Fine.", "reasoning_content": "Well."})
    send("GET", f"/sessions/{session}")
    send("POST", f"/sessions/{session}/samples", {})
    send("DELETE", f"/sessions/{session}")
    connection.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("history", ["linear", "tree"])
def test_turns_leave_no_cycles(serve: Serve, history: str, stream: bool) -> None:
    server = serve(history=history)
    converse(server, 3, stream=stream)
    with kept_garbage() as found:
        converse(server, TURNS, stream=stream)
    kinds = Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in found)
    assert sum(kinds.values()) < TURNS, kinds.most_common()  # not one object for each turn


def test_a_cycle_would_be_found() -> None:
    with kept_garbage() as found:
        for _ in range(TURNS):
            loop: list[Any] = []
            loop.append(loop)
        del loop
    assert len(found) >= TURNS
