"""How long one session's turns wait for another's large request.

A small session takes turns without pause while a large one does something large; what counts is the slowest small
turn, less what such a turn takes when nothing else happens. Both have engines of their own, and client threads that
only send and receive bytes, so that the server is what they share.

A small turn also waits while other programs have the processor. So a wait counts only as far as the server itself
computed in that time, in any of its threads: whatever keeps a turn waiting inside the server is computing.
"""

from __future__ import annotations

import http.client
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
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

    def close(self) -> None:
        """Close the connection."""
        self._to.close()

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
    """Small turns, one after the other, and what each took."""

    def __init__(self, server: Served) -> None:
        super().__init__(daemon=True)
        self.client = Client(server)
        self.turns: list[SmallTurn] = []
        self._server = server
        self._over = threading.Event()

    def run(self) -> None:
        """Until `finish`: the first turn, again and again, so that it stays small."""
        while not self._over.is_set():
            self.client.messages = [{"role": "user", "content": "Begin."}]
            began, cpu = time.perf_counter(), self._server.cpu()
            self.client.turn()
            ended = time.perf_counter()
            self.turns.append(SmallTurn(began, ended, self._server.cpu() - cpu))
            time.sleep(0.001)

    def finish(self) -> None:
        """End it."""
        self._over.set()
        self.join()
        self.client.close()


@dataclass(frozen=True)
class SmallTurn:
    """When a turn began and ended, and how many seconds the server computed meanwhile."""

    began: float
    ended: float
    cpu: float

    @property
    def took(self) -> float:
        """Seconds."""
        return self.ended - self.began


def beside(server: Served, work: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds: the longest wait of a small turn during `work`, and what one takes when nothing else happens."""
    watch = Watch(server)
    watch.start()
    time.sleep(QUIET_SECONDS)
    began = time.perf_counter()
    work()
    time.sleep(0.05)  # what the server does behind the answer counts too
    ended = time.perf_counter()
    watch.finish()
    before = [turn for turn in watch.turns if turn.ended < began]
    took, cpu = (statistics.median(getattr(turn, name) for turn in before) for name in ("took", "cpu"))
    during = (turn for turn in watch.turns if turn.ended >= began and turn.began <= ended)
    return max(min(turn.took - took, turn.cpu - cpu) for turn in during) * 1e3, took * 1e3


def waits(bench: Bench, *, short: bool = False) -> Iterator[Figure]:
    """The longest waits beside large prompts, large bodies of several kinds, and what is done with huge sessions."""
    rounds = 1 if short else 5
    server = bench.server(bench.engine(), bench.engine())
    for name, content in BODIES.items():
        yield _wait(f"beside {name}", server, partial(_one_turn, server, content(random.Random(1))), rounds)
    with closing(_long_session(server, 100 if short else 400)) as huge:
        yield from _beside_uses("linear", server, huge, rounds)
    tree = bench.server(bench.engine(), bench.engine(), flags=("--history", "tree"))
    with closing(_wide_session(tree, 300 if short else 1023)) as huge:
        yield from _beside_uses("tree", tree, huge, rounds)


def _one_turn(server: Served, body: bytes) -> None:
    with closing(Client(server)) as client:
        client.post_turn(body)


def _beside_uses(history: str, server: Served, huge: Client, rounds: int) -> Iterator[Figure]:
    """Everything that is done with a huge session."""
    path = f"/sessions/{huge.id}"
    for name, method, below in (
        ("GET", "GET", ""),
        ("metadata", "GET", "?records=none"),
        ("samples", "POST", "/samples"),
    ):
        work = partial(huge.send, method, path + below, b"{}")
        yield _wait(f"beside {name} of a huge session, {history}", server, work, rounds)
    yield _wait(f"beside DELETE of a huge session, {history}", server, lambda: huge.send("DELETE", path), 1)


def _wait(name: str, server: Served, work: Callable[[], object], rounds: int) -> Figure:
    """The middle one of several rounds."""
    worst, usual = statistics.median_low(beside(server, work) for _ in range(rounds))
    return Figure(name=f"longest wait {name}", value=worst, bar=MILLISECONDS, unit="ms", detail={"usual ms": usual})


def _long_session(server: Served, turns: int) -> Client:
    """A session of so many turns, which are a long prompt together."""
    client, rng = Client(server), random.Random(2)
    for _ in range(turns):
        client.turn()
        client.messages[-1]["content"] = words(rng, LONG_PROMPT // turns - 70)
    client.turn()
    return client


def _wide_session(server: Served, leaves: int) -> Client:
    """A session of a tree in which so many turns follow one."""
    client = Client(server)
    client.messages = [{"role": "user", "content": words(random.Random(3), 2000)}]
    client.turn()
    root = list(client.messages)
    for number in range(leaves):
        client.messages = [*root[:-1], {"role": "user", "content": f"Try {number}."}]
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
