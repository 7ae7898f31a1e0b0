"""An engine that samples nothing and answers at once, so that what is measured is the server in front of it.

Usage: `python mock_engine.py PORT TOKENIZER_DIRECTORY SAMPLED_TOKENS [DELAY_SECONDS]`. Every answer samples the same
tokens: some reasoning, some text, the end of the turn. The prompt's length is counted from the request's `input_ids`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import uvicorn
from tokenizers import Tokenizer

WORDS = ("I", "look", "at", "the", "output", "and", "change", "one", "line", "of", "the", "module", "then", "run", "it")
REASONING = "The last result tells what to do."


@dataclass(frozen=True)
class Answer:
    """What is sampled: the parts of a message and the entries of `output_token_logprobs`."""

    content: str
    entries: list[list[Any]]

    @classmethod
    def of(cls, directory: Path, tokens: int) -> Answer:
        """About so many sampled tokens, of Qwen3's format."""
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        content = " ".join(WORDS[n % len(WORDS)] for n in range(max(tokens - 15, 1)))
        text = f"<think>\n{REASONING}\n</think>\n\n{content}<|im_end|>"
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        return cls(content, [[-(1 + n % 11) / 16, token, None] for n, token in enumerate(ids)])

    def body(self, number: int, prompt_tokens: int) -> bytes:
        """The answer to one request, as SGLang writes it."""
        sampled = len(self.entries)
        message = {
            "role": "assistant",
            "content": self.content,
            "reasoning_content": REASONING,
            "tool_calls": None,
        }
        meta = {
            "id": f"{number:032x}",
            "finish_reason": {"type": "stop", "matched": self.entries[-1][1]},
            "prompt_tokens": prompt_tokens,
            "completion_tokens": sampled,
            "cached_tokens": max(prompt_tokens - 8, 0),
            "weight_version": "default",
            "output_token_logprobs": self.entries,
            "e2e_latency": 0.004,
        }
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "meta_info": meta}
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": prompt_tokens + sampled,
        }
        head = {"id": f"{number:032x}", "object": "chat.completion", "created": 1_750_000_000, "model": "bench"}
        return orjson.dumps({**head, "choices": [choice], "usage": usage})


class Engine:
    """The ASGI application."""

    def __init__(self, answer: Answer, delay: float) -> None:
        self.answer = answer
        self.delay = delay
        self.number = 0

    async def __call__(
        self,
        scope: dict[str, Any],
        receive: Callable[[], Awaitable[dict[str, Any]]],
        send: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        """Answer a chat request; anything else is told `{}`."""
        parts = []
        while True:
            event = await receive()
            parts.append(event.get("body", b""))
            if not event.get("more_body"):
                break
        out = b"{}"
        if scope["path"] == "/v1/chat/completions":
            self.number += 1
            out = self.answer.body(self.number, len(orjson.loads(b"".join(parts)).get("input_ids") or ()))
            if self.delay:
                await asyncio.sleep(self.delay)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(out)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": out})


if __name__ == "__main__":
    port, directory, tokens, *rest = sys.argv[1:]
    engine = Engine(Answer.of(Path(directory), int(tokens)), float(rest[0]) if rest else 0.0)
    uvicorn.run(
        engine,
        port=int(port),
        log_level="error",
        access_log=False,
        lifespan="off",
        loop="uvloop",
        http="httptools",
        backlog=4096,
    )
