"""How long one session's turns wait for another's large request.

A small session takes turns without pause while a large one does something large; what counts is the slowest small
turn, less what such a turn takes when nothing else happens. Both have engines of their own, and client threads that
only send and receive bytes, so that the server is what they share.
"""

from __future__ import annotations

import http.client
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import orjson
from load import WORDS, chat, words
from processes import Bench, Served
from report import Figure

LONG_PROMPT = 200_000
LARGE_BODY = 4 * 2**20 - 4096
MILLISECONDS = 20.0
QUIET_SECONDS = 0.5


class Client:
    """One connection to a server, and one session there."""

    def __init__(self, server: Served) -> None:
        self._to = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=600)
        self.id = orjson.loads(self.send("POST", "/sessions", b"{}"))["session_id"]
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": "Begin."}]

    def send(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """The answer's body, which is thrown away beyond its first megabytes."""
        self._to.request(method, path, body, {"content-type": "application/json"})
        answer = self._to.getresponse()
        kept = answer.read(2**22)
        while answer.read(2**20):
            pass
        if answer.status >= 300:
            raise SystemExit(f"{method} {path}: {answer.status} {kept[:300]!r}")
        return kept

    def turn(self) -> None:
        """One turn, whose answer joins the conversation."""
        raw = self.send("POST", f"/sessions/{self.id}/v1/chat/completions", chat(self.messages))
        message = orjson.loads(raw)["choices"][0]["message"]
        self.messages.append({key: value for key, value in message.items() if value is not None})
        self.messages.append({"role": "tool", "tool_call_id": "c", "content": "Nothing changed."})

    def post_turn(self, body: bytes) -> None:
        """One turn of a body that is ready."""
        self.send("POST", f"/sessions/{self.id}/v1/chat/completions", body)


class Watch(threading.Thread):
    """Small turns, one after the other, and how long each took."""

    def __init__(self, server: Served) -> None:
        super().__init__(daemon=True)
        self.client = Client(server)
        self.seconds: list[tuple[float, float]] = []
        """When each turn ended, and how long it took."""
        self._over = threading.Event()

    def run(self) -> None:
        """Until `finish`: the first turn, again and again, so that it stays small."""
        while not self._over.is_set():
            self.client.messages = [{"role": "user", "content": "Begin."}]
            began = time.perf_counter()
            self.client.turn()
            ended = time.perf_counter()
            self.seconds.append((ended, ended - began))
            time.sleep(0.001)

    def finish(self) -> None:
        """End it."""
        self._over.set()
        self.join()


def beside(server: Served, work: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds: the slowest small turn during `work` beyond the usual one, and the usual one."""
    watch = Watch(server)
    watch.start()
    time.sleep(QUIET_SECONDS)
    began = time.perf_counter()
    work()
    ended = time.perf_counter()
    time.sleep(0.05)
    watch.finish()
    usual = statistics.median(took for when, took in watch.seconds if when < began)
    worst = max(took for when, took in watch.seconds if began <= when and when - took <= ended)
    return (worst - usual) * 1e3, usual * 1e3


def waits(bench: Bench, *, short: bool = False) -> Iterator[Figure]:
    """The longest waits beside large prompts, large bodies of several kinds, and a huge session's reads."""
    server = bench.server(bench.engine(), bench.engine())
    rounds = 3 if short else 5
    for name, content in BODIES.items():
        body = content(random.Random(1))
        yield _wait(f"beside {name}", server, lambda body=body: Client(server).post_turn(body), rounds)
    huge = _huge(server)
    yield _wait("beside GET of a huge session", server, lambda: huge.send("GET", f"/sessions/{huge.id}"), rounds)
    path = f"/sessions/{huge.id}/samples"
    yield _wait("beside samples of a huge session", server, lambda: huge.send("POST", path, b"{}"), rounds)


def _wait(name: str, server: Served, work: Callable[[], object], rounds: int) -> Figure:
    """The least of several rounds: other programs may only make waits longer."""
    worst, usual = min(beside(server, work) for _ in range(rounds))
    return Figure(name=f"longest wait {name}", value=worst, bar=MILLISECONDS, unit="ms", detail={"usual ms": usual})


def _huge(server: Served) -> Client:
    """A session of a long prompt and some tens of turns."""
    client = Client(server)
    client.messages = [{"role": "user", "content": words(random.Random(2), LONG_PROMPT)}]
    for _ in range(30):
        client.turn()
    return client


# -- what large requests look like -------------------------------------------------------------------------------------


def _one(text: str) -> bytes:
    return chat([{"role": "user", "content": text}])


def _long_prompt(rng: random.Random) -> bytes:
    return _one(words(rng, LONG_PROMPT))


def _words(rng: random.Random) -> bytes:
    return _one(words(rng, LARGE_BODY // 5)[: LARGE_BODY - 600])


def _code(rng: random.Random) -> bytes:
    """Text as tools print it: lines, quotes, numbers, and characters beyond ASCII."""
    lines = [f'  if {rng.choice(WORDS)}["{n}"] != {n * 7}:  # “{rng.choice(WORDS)}” → é' for n in range(70_000)]
    return _one("\n".join(lines))


def _messages(rng: random.Random) -> bytes:
    """Ten thousand messages."""
    each = [{"role": ("user", "assistant")[n % 2], "content": words(rng, 58)} for n in range(LARGE_BODY // 400)]
    return chat([*each[: len(each) // 2 * 2], {"role": "user", "content": "end"}])


def _tools(rng: random.Random) -> bytes:
    """Tools that fill the body."""
    tools = []
    for number in range(LARGE_BODY // 5000):
        fields = {f"field_{n}": {"type": "string", "description": words(rng, 10)} for n in range(40)}
        schema = {"type": "object", "properties": fields}
        tools.append({"type": "function", "function": {"name": f"tool_{number}", "parameters": schema}})
    return orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "go"}], "tools": tools})


BODIES: dict[str, Callable[[random.Random], bytes]] = {
    "a first prompt of 200 000 tokens": _long_prompt,
    "a body of 4 MB, words": _words,
    "a body of 4 MB, code": _code,
    "a body of 4 MB, messages": _messages,
    "a body of 4 MB, tools": _tools,
}
