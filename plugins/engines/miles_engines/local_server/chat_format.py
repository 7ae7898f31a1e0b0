"""Text on one side, ids on the other: the checkpoint's tokenizer and the family's chat format."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from miles_core.tito import BoundFamily, StreamParser, Tokenizer, load_tokenizer
from miles_core.types import Message, Tool


class ChatFormat:
    """What requests need of the family and the tokenizer."""

    def __init__(self, family: BoundFamily, tokenizer: Tokenizer) -> None:
        self._family = family
        self._tokenizer = tokenizer
        self.name = family.name
        self.stop_ids = tuple(family.stop_ids)
        self.reasoning_parser = family.family.reasoning_parser
        self.tool_call_parser = family.family.tool_call_parser
        self.token_text = lru_cache(maxsize=65536)(self._token_text)

    def _token_text(self, token: int) -> str:
        return self._tokenizer.decode([token])

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] | None, kwargs: Mapping[str, Any]) -> list[int]:
        """Ids of the rendered conversation with the generation prompt."""
        return self.encode(self._family.render(messages, tools=tools, kwargs=self._family.merge_kwargs(kwargs)))

    def kwargs(self, given: Mapping[str, Any] | None, effort: str | None) -> dict[str, Any]:
        """Template kwargs of a request: `reasoning_effort` is one of them, and `none` turns thinking off."""
        if effort is None:
            return dict(given or {})
        off = dict.fromkeys(self._family.family.thinking_kwargs, False) if effort == "none" else {}
        return {"reasoning_effort": effort, **off, **(given or {})}

    def encode(self, text: str) -> list[int]:
        """Ids of a text; spelled-out control tokens become those tokens."""
        return self._tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens spelled out."""
        return self._tokenizer.decode(ids)

    def visible(self, ids: Sequence[int]) -> list[int]:
        """The ids without the special ones."""
        return [token for token in ids if token not in self._tokenizer.special_ids]

    def parser(
        self, prompt: Sequence[int], tools: Sequence[Tool] | None, *, calls: bool, reasoning: bool
    ) -> MessageBuilder:
        """A parser of one generation after `prompt`, which may have opened the reasoning already."""
        return MessageBuilder(self._family.parser(tools, prompt_ids=prompt, calls=calls, reasoning=reasoning))

    def reasoning_tokens(self, ids: Sequence[int], message: Message) -> int:
        """How many of the sampled ids are reasoning, the closing tag included."""
        end = self._family.reasoning_end
        if end is None or not message["reasoning_content"]:
            return 0
        closer = self._tokenizer.token_to_id(end)
        return ids.index(closer) + 1 if closer in ids else len(ids)


class MessageBuilder:
    """Turns sampled ids into deltas, and the deltas into the message they amount to."""

    def __init__(self, parser: StreamParser) -> None:
        self._parser = parser
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def feed(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        """Deltas that these ids complete."""
        return self._keep(self._parser.feed(ids))

    def finish(self) -> list[dict[str, Any]]:
        """Deltas held back until the end."""
        return self._keep(self._parser.finish())

    def _keep(self, deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for delta in deltas:
            self._content.append(delta.get("content") or "")
            self._reasoning.append(delta.get("reasoning_content") or "")
            for call in delta.get("tool_calls") or ():
                self._keep_call(call)
        return deltas

    def _keep_call(self, part: dict[str, Any]) -> None:
        """Give a call an id unless its format carries one, and add a part of it to what is known."""
        index = part["index"]
        function = part.get("function") or {}
        if index == len(self._calls):
            part.setdefault("id", f"call_{secrets.token_hex(12)}")
            part.setdefault("type", "function")
            name = function.get("name")
            self._calls.append(
                {"id": part["id"], "index": index, "type": "function", "function": {"name": name, "arguments": ""}}
            )
        self._calls[index]["function"]["arguments"] += function.get("arguments") or ""

    @property
    def called(self) -> bool:
        """Whether a whole tool call has been read."""
        return bool(self._calls)

    def message(self) -> Message:
        """The message so far, with SGLang's keys."""
        reasoning = "".join(self._reasoning)
        message: Message = {
            "role": "assistant",
            "content": "".join(self._content),
            "reasoning_content": reasoning or None,
        }
        if self._calls:
            message["tool_calls"] = self._calls
        return message


def load(selector: str, checkpoint: str) -> ChatFormat:
    """The family that `selector` names, for the tokenizer of `checkpoint`."""
    from miles_core.plugins import Registry  # finds every plugin: needed by this process alone, and once
    from miles_core.plugins.families import family_of, resolve

    tokenizer, registry = load_tokenizer(checkpoint), Registry.discover()
    plugin = registry.load("family", resolve(registry, selector, checkpoint))
    return ChatFormat(family_of(plugin).bind(tokenizer, plugin.revision), tokenizer)
