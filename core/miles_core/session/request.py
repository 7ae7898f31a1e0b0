"""What a chat request may say, and which of its fields the engine is sent."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_core.errors import RequestError
from miles_core.session.body import check_depth, load_body, short
from miles_core.session.long_body import loads_long
from miles_core.session.tree import tools_key
from miles_core.tito import normalise_tools
from miles_core.types import Message

log = logging.getLogger("miles.session")


@dataclass(frozen=True, slots=True)
class Checked:
    """A request's body in which everything is as it should be, and the key of its tools, if it has any."""

    body: dict[str, Any]
    tools_key: bytes | None


def load_checked(raw: bytes) -> Checked:
    """Read and check a long request. Looks at no session: any thread may do it."""
    body = load_body(raw, loads_long)
    check_messages(request_messages(body))
    check_fields(body)
    return Checked(body, key_of_tools(body))


def key_of_tools(body: dict[str, Any]) -> bytes | None:
    """The key of the request's tools. Raises RequestError for what is no list of tools."""
    tools = normalise_tools(body.get("tools"))
    return None if tools is None else tools_key(tools)


def request_messages(body: dict[str, Any]) -> list[Message]:
    """The messages; `check_messages` looks at each. Raises RequestError if there are none."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"messages must be a non-empty list of chat messages (found {short(messages)})")
    return messages


def check_messages(messages: Sequence[Any], repeated: int = 0) -> None:
    """Raise RequestError for messages that are none, but for the first ones, which repeat others that were checked."""
    for index in range(repeated, len(messages)):
        message = messages[index]
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"]:
            raise RequestError(f"messages[{index}] must be an object with a role (found {short(message)})")
    check_depth(messages[repeated:], within=1)


def check_fields(body: dict[str, Any]) -> None:
    """Raise RequestError for a field that says what a session's turn cannot do."""
    check_depth({key: value for key, value in body.items() if key != "messages"})
    n = body.get("n")
    if n is not None and (n != 1 or isinstance(n, bool)):
        raise RequestError(f"n={short(n)}: a session's turn is one generation; n must be 1")
    if body.get("continue_final_message"):
        raise RequestError(
            "continue_final_message is not possible in a session: the server owns the tokens of every turn"
        )
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise RequestError(f"stream must be true or false (found {short(stream)})")
    kwargs = body.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise RequestError(f"chat_template_kwargs must be an object (found {short(kwargs)})")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise RequestError(f"stream_options must be an object (found {short(options)})")


DROPPED = frozenset({
    "messages", "input_ids", "stream", "stream_options", "rid", "logprob_start_len", "chat_template_kwargs",
})  # fmt: skip
"""Fields of the agent's that are replaced or not sent."""

WHOLE_ONLY = ("return_token_ids", "return_prompt_token_ids", "return_indexer_topk")
"""Fields that SGLang refuses or leaves unanswered with `stream=true`."""


def engine_fields(body: dict[str, Any], rid: str) -> dict[str, Any]:
    """Every field of the engine's request apart from messages and ids."""
    if body.get("logprob_start_len") is not None:
        log.warning(
            "logprob_start_len=%r dropped: scoring the prompt defeats the prefix cache",
            body["logprob_start_len"],
        )
    fields = {key: value for key, value in body.items() if key not in DROPPED}
    fields.update(logprobs=True, return_meta_info=True, no_stop_trim=False, rid=rid)
    return fields


def live_fields(fields: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The same for a streamed answer, whose last chunks have what else stands in `meta_info`; `options` are the
    agent's `stream_options`."""
    return {
        **{key: value for key, value in fields.items() if key != "return_meta_info"},
        "stream": True,
        "stream_options": {**options, "include_usage": True},
        "return_output_ids_in_sglext": True,
        "return_cached_tokens_details": True,
        "return_spec_tokens_details": True,
    }
