"""Talking to a session server as agents and trainers do, over plain HTTP."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from miles_core.server.app import ServerThread
from miles_core.session import wire

Json = Any
Message = dict[str, Any]
Serve = Callable[..., ServerThread]
"""Starts a server with settings of its own, given by name."""


def user(text: Any) -> Message:
    """A user's message."""
    return {"role": "user", "content": text}


def tool(text: Any, call_id: str = "c") -> Message:
    """A tool's result."""
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def assistant(text: Any, **keys: Any) -> Message:
    """An assistant's message."""
    return {"role": "assistant", "content": text, **keys}


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CLOCK = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}


@dataclass(frozen=True)
class Answer:
    """A whole HTTP answer; `headers` are as they came, in order, names in lower case."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def json(self) -> Json:
        """The body, read."""
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The text of an error, whose shape is checked."""
        value = self.json
        assert isinstance(value["error"], str)
        assert isinstance(value["type"], str)
        assert value["code"] == self.status
        assert "Traceback" not in value["error"]
        return str(value["error"])

    @property
    def message(self) -> Message:
        """The message of a chat answer."""
        found: Message = self.json["choices"][0]["message"]
        return found

    def header(self, name: str) -> str | None:
        """A header's value, which is there once at most."""
        found = [value for key, value in self.headers if key == name]
        assert len(found) <= 1, self.headers
        return found[0] if found else None


def request(
    url: str,
    method: str = "GET",
    body: Json = None,
    *,
    raw: bytes | None = None,
    headers: dict[str, str] | None = None,
    timeout: float = 30,
) -> Answer:
    """One request on a connection of its own; `body` is sent as JSON, `raw` as it is."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=timeout)
    data = raw if raw is not None else (json.dumps(body).encode() if body is not None else None)
    try:
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        connection.request(method, target, data, {"Content-Type": "application/json", **(headers or {})})
        response = connection.getresponse()
        return Answer(response.status, [(k.lower(), v) for k, v in response.getheaders()], response.read())
    finally:
        connection.close()


class Talk:
    """One session and its conversation so far."""

    def __init__(self, server: str, *, key: str | None = None, **settings: Any) -> None:
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        made = request(f"{server}/sessions", "POST", settings or None, headers=self.headers)
        assert made.status == 200, made.body
        self.created: Json = made.json
        self.id: str = made.json["session_id"]
        self.url = f"{server}/sessions/{self.id}"
        self.chat_url = f"{self.url}/v1/chat/completions"
        self.history: list[Message] = []

    def post(self, messages: Json, **fields: Any) -> Answer:
        """A chat request with exactly these messages; the history here stays."""
        body = {"model": "m", "messages": messages, **fields}
        return request(self.chat_url, "POST", body, headers=self.headers)

    def post_raw(self, raw: bytes) -> Answer:
        """A chat request with this body."""
        return request(self.chat_url, "POST", raw=raw, headers=self.headers)

    def ask(self, *messages: Message, **fields: Any) -> Answer:
        """Append messages to the history; a good answer is appended too."""
        sent = [*self.history, *messages]
        answer = self.post(sent, **fields)
        assert answer.status == 200, answer.body
        self.history = [*sent, answer.message]
        return answer

    def state(self, records: str | None = None) -> bytes:
        """What `GET /sessions/{id}` shows."""
        answer = request(self.url + (f"?records={records}" if records else ""), headers=self.headers)
        assert answer.status == 200, answer.body
        return answer.body

    @property
    def records(self) -> list[Json]:
        """The session's records."""
        found: list[Json] = json.loads(self.state())["records"]
        return found

    @property
    def metadata(self) -> dict[str, Any]:
        """The session's metadata."""
        found: dict[str, Any] = json.loads(self.state("none"))["metadata"]
        return found

    def samples(self, max_seq_len: int | None = None) -> wire.SamplesReply:
        """The session's samples, decoded."""
        body = {"max_seq_len": max_seq_len, "metadata": None}
        answer = request(f"{self.url}/samples", "POST", body, headers=self.headers)
        assert answer.status == 200, answer.body
        assert answer.header("content-type") == "application/octet-stream"
        return wire.decode(answer.body)

    def delete(self) -> Answer:
        """End it."""
        return request(self.url, "DELETE", headers=self.headers)
