"""What stands on the wire: each header once, and nothing of the engine's connection."""

from __future__ import annotations

import json
import socket
from urllib.parse import urlsplit

import aiohttp
import pytest

from helpers.fake_engine import FakeEngine, refuses, says
from helpers.sessions import Talk, user

ONCE = ("server", "date", "content-type", "content-length")
OF_THE_ENGINE = (
    ("Server", "uvicorn"),
    ("Date", "Mon, 01 Jan 2001 00:00:00 GMT"),
    ("X-Engine", "kept"),
    ("Keep-Alive", "timeout=5"),
)
GOOD = {"model": "m", "messages": [user("u")]}


def head_of(url: str, method: str, body: bytes, *, keep: bool = False) -> tuple[str, list[tuple[str, str]]]:
    """Status line and header lines as they came."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=10) as connection:
        lines = [f"{method} {parts.path} HTTP/1.1", f"Host: {parts.netloc}", f"Content-Length: {len(body)}"]
        lines += [] if keep else ["Connection: close"]
        connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        got = b""
        while b"\r\n\r\n" not in got:
            got += connection.recv(65536)
    first, *rest = got.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
    return first, [(line.partition(":")[0].lower(), line.partition(":")[2].strip()) for line in rest]


@pytest.mark.parametrize("what", ["turn", "refusal", "passed on", "our error", "health"])
def test_each_header_once(talk: Talk, engine: FakeEngine, url: str, what: str) -> None:
    good = says()
    good.headers = [*good.headers, *OF_THE_ENGINE]
    refusal = refuses(503, b'{"message": "no"}', *OF_THE_ENGINE)
    target, method, body = {
        "turn": (talk.chat_url, "POST", json.dumps(GOOD).encode()),
        "refusal": (talk.chat_url, "POST", json.dumps(GOOD).encode()),
        "passed on": (f"{talk.url}/v1/models", "GET", b""),
        "our error": (talk.chat_url, "POST", b"{"),
        "health": (f"{url}/health", "GET", b""),
    }[what]
    engine.plays(refusal if what == "refusal" else good)
    first, headers = head_of(target, method, body)
    names = [name for name, _ in headers]
    assert [(name, names.count(name)) for name in ONCE] == [(name, 1) for name in ONCE], headers
    assert not {"transfer-encoding", "content-encoding", "keep-alive"} & set(names)
    assert dict(headers)["date"] != "Mon, 01 Jan 2001 00:00:00 GMT"
    assert first.split()[1] == {"refusal": "503", "our error": "400"}.get(what, "200")
    if what == "refusal":
        assert ("x-engine", "kept") in headers


async def test_a_strict_client_reads_every_answer(talk: Talk, engine: FakeEngine) -> None:
    good = says()
    good.headers = [*good.headers, *OF_THE_ENGINE]
    engine.plays(good)
    async with aiohttp.ClientSession() as http:
        async with http.post(talk.chat_url, json=GOOD) as answer:
            assert answer.status == 200
            assert (await answer.json())["choices"]
        async with http.get(f"{talk.url}/v1/models") as answer:
            assert answer.status == 200
            await answer.read()
        async with http.get(talk.url) as answer:
            assert len((await answer.json())["records"]) == 1
