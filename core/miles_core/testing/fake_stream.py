"""A fake engine's chat answer as SGLang with parsers streams it: a chunk a token, the ids and counts at the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from miles_core.types import Json

SHORT = 3
"""Characters of text in one delta."""


def chat_events(reply: Json, body: Mapping[str, Any], spell: Callable[[int], str]) -> list[bytes]:
    """The events of a whole answer, `[DONE]` included; `body` is the request, `spell` decodes one id."""
    (choice,) = reply["choices"]
    meta = choice["meta_info"]
    head = {"id": reply["id"], "object": "chat.completion.chunk", "created": reply["created"], "model": reply["model"]}

    def chunk(delta: Mapping[str, Any], log_probs: Any = None, finish: str | None = None, matched: Any = None) -> Json:
        part = {"index": 0, "delta": {"reasoning_content": None, **delta}, "logprobs": log_probs}
        return {**head, "choices": [{**part, "finish_reason": finish, "matched_stop": matched}]}

    chunks = [chunk({"role": "assistant", "content": ""})]
    deltas = _deltas(choice["message"])
    for value, token, _ in meta["output_token_logprobs"]:
        text = spell(token)
        entry = {"token": text, "bytes": list(text.encode()), "logprob": value, "top_logprobs": []}
        chunks.append(chunk(next(deltas, {}), {"content": [entry]} if body.get("logprobs") else None))
    chunks += [chunk(delta) for delta in deltas]
    chunks.append(chunk({}, finish=choice["finish_reason"], matched=meta["finish_reason"].get("matched")))
    if extension := _extension(meta, body):
        chunks.append({**head, "choices": [], "usage": None, "sglext": extension})
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append({**head, "choices": [], "usage": reply["usage"]})
    return [*map(event, chunks), b"data: [DONE]\n\n"]


def event(data: Json) -> bytes:
    """An event of JSON data."""
    return b"data: " + json.dumps(data, ensure_ascii=False).encode("utf-8") + b"\n\n"


def data_of(sent: bytes) -> Json:
    """The JSON of an event; None for `[DONE]`."""
    text = sent.removeprefix(b"data: ")
    return None if text.startswith(b"[DONE]") else json.loads(text)


def fault(message: str, code: int = 500, kind: str = "InternalServerError") -> bytes:
    """An error as SGLang reports it inside a stream."""
    body = {"object": "error", "message": message, "type": kind, "param": None, "code": code}
    return event({"error": body})


def _deltas(message: Mapping[str, Any]) -> Iterator[Json]:
    for key in ("reasoning_content", "content"):
        yield from ({key: text} for text in _pieces(message.get(key) or ""))
    for call in message.get("tool_calls") or ():
        yield {"tool_calls": [{**call, "function": {**call["function"], "arguments": ""}}]}
        for text in _pieces(call["function"]["arguments"]):
            part = {"id": None, "index": call["index"], "type": "function"}
            yield {"tool_calls": [{**part, "function": {"name": None, "arguments": text}}]}


def _pieces(text: str) -> Sequence[str]:
    return [text[at : at + SHORT] for at in range(0, len(text), SHORT)]


def _extension(meta: Mapping[str, Any], body: Mapping[str, Any]) -> Json:
    extension: dict[str, Any] = {}
    if body.get("return_routed_experts") and meta.get("routed_experts") is not None:
        extension["routed_experts"] = meta["routed_experts"]
    if body.get("return_cached_tokens_details") and meta.get("cached_tokens"):
        extension["cached_tokens_details"] = {"device": meta["cached_tokens"], "host": 0}
    if body.get("return_output_ids_in_sglext"):
        extension["output_ids"] = [[token for _, token, _ in meta["output_token_logprobs"]]]
    return extension
