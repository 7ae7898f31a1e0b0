"""The public fake engine, whose model is Qwen3 in small."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from helpers.chat_tokenizer import IM_END, chat_family, encode
from miles_core.testing.fake_engine import FakeEngine, Gate, Recorded, Reply, chat_reply, refuses
from miles_core.types import Json

__all__ = ["FakeEngine", "Gate", "Json", "Recorded", "Reply", "fake_engine", "refuses", "sampled_text", "says"]


def sampled_text(content: str, reasoning: str, calls: Sequence[tuple[str, str]]) -> str:
    """What Qwen3 writes for a message, without the end-of-turn token."""
    text = f"<think>\n{reasoning}\n</think>\n\n{content}"
    for number, (name, arguments) in enumerate(calls):
        lead = "\n" if content or number else ""
        text += f'{lead}<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    return text


def says(
    content: str = "Fine.",
    *,
    reasoning: str = "Well.",
    calls: Sequence[tuple[str, str]] = (),
    ids: Sequence[int] | None = None,
    **fields: Any,
) -> Reply:
    """A good chat answer. The ids are what the model would sample for it, unless others are given."""
    sampled = [*encode(sampled_text(content, reasoning, calls)), IM_END] if ids is None else list(ids)
    return chat_reply(sampled, content, reasoning=reasoning, calls=calls, **fields)


@contextmanager
def fake_engine() -> Iterator[FakeEngine]:
    """A running engine."""
    engine = FakeEngine(chat_family(), always=lambda body: says())
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()
