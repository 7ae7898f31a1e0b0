"""What agents on the OpenAI client share: the client, and one turn whose answer goes back as it came."""

from __future__ import annotations

import inspect
import ssl
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from miles_core.errors import ConfigError
from miles_core.types import Message, Tool

if TYPE_CHECKING:
    from openai import AsyncOpenAI


def key_of(kwargs: Mapping[str, Any], metadata: Mapping[str, Any]) -> str:
    """The session's key, where the server wants one."""
    return str(kwargs.get("api_key") or metadata.get("session_api_key") or "EMPTY")


def client_of(base_url: str, api_key: str, *, agent: str) -> AsyncOpenAI:
    """A client of one session, without a time limit of its own. Raises ConfigError if openai is not installed."""
    try:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient
    except ImportError as error:
        raise ConfigError(f"the {agent} agent needs openai: pip install 'miles-plugins[agents]'") from error
    http = DefaultAsyncHttpxClient(verify=_ssl_context(), timeout=None)
    return AsyncOpenAI(base_url=f"{base_url}/v1", api_key=api_key, http_client=http, timeout=None)


@lru_cache(maxsize=1)
def _ssl_context() -> ssl.SSLContext:
    """Shared by all clients: making one reads every root certificate, 40 ms per rollout."""
    return ssl.create_default_context()


async def ask(
    client: AsyncOpenAI, messages: Sequence[Message], tools: Sequence[Tool], request_kwargs: Mapping[str, Any]
) -> tuple[Message, str]:
    """One turn: the answer as it came, so that it is sent back unchanged, and its finish reason."""
    create: Any = client.chat.completions.create
    known = inspect.signature(create).parameters  # an engine's own fields are none of the client's
    typed = {key: value for key, value in request_kwargs.items() if key in known}
    extra = {key: value for key, value in request_kwargs.items() if key not in known}
    own = {"tools": list(tools)} if tools else {}
    reply = await create(**{"model": "default", **own, **typed, "messages": list(messages)}, extra_body=extra or None)
    choice = reply.choices[0]
    message: Message = choice.message.model_dump(exclude_unset=True, exclude_none=True)
    return message, str(choice.finish_reason)
