"""The prompt format of Kimi K2.5 and K2.6, append-only: every assistant turn keeps its reasoning block.

A turn is `<|im_ROLE|>NAME<|im_middle|>BODY<|im_end|>` without newlines. An encoder and not a template, since the
tools of a request are written as TypeScript (`kimi_tools.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_core.errors import RenderError
from miles_core.types import Message, Tool
from miles_tito_families.kimi_tools import declare_tools

_OPENERS = {
    "system": "<|im_system|>",
    "user": "<|im_user|>",
    "assistant": "<|im_assistant|>",
    "tool": "<|im_system|>",
}


@dataclass(frozen=True, kw_only=True)
class KimiEncoder:
    """Messages to Kimi's text.

    `reasoning_keys` are where a message's reasoning is looked for, `off_blanks_reasoning` says that with
    `thinking=False` no turn shows its reasoning.
    """

    source: str
    reasoning_keys: tuple[str, ...] = ("reasoning_content",)
    off_blanks_reasoning: bool = False

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        kwargs: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The text of a conversation. Raises RenderError for what the format cannot carry."""
        off = kwargs.get("thinking") is False
        return "".join(
            [
                self._declaration(tools, kwargs.get("tools_ts_str")),
                *(self._turn(index, message, off) for index, message in enumerate(messages)),
                self._prompt(off) if add_generation_prompt else "",
            ]
        )

    def _declaration(self, tools: Sequence[Tool] | None, written: Any) -> str:
        if not tools:
            return ""
        text = written if isinstance(written, str) and written else declare_tools(tools)
        return f"<|im_system|>tool_declare<|im_middle|>{text}<|im_end|>"

    def _turn(self, index: int, message: Message, off: bool) -> str:
        role = message["role"]
        if role not in _OPENERS:
            raise RenderError(
                f"Kimi has no role {role!r} (messages[{index}]); it knows system, user, assistant and tool"
            )
        body = _text(message["content"])
        if role == "tool":
            body = f"## Return of {_string(message, 'tool_call_id')}\n{body}"
        elif role == "assistant":
            reasoning = "" if off and self.off_blanks_reasoning else self._reasoning(message)
            body = f"<think>{reasoning}</think>{body}{_calls(message.get('tool_calls') or [])}"
        return f"{_OPENERS[role]}{_string(message, 'name') or role}<|im_middle|>{body}<|im_end|>"

    def _reasoning(self, message: Message) -> str:
        return next((text for key in self.reasoning_keys if (text := _string(message, key))), "")

    def _prompt(self, off: bool) -> str:
        return "<|im_assistant|>assistant<|im_middle|><think>" + ("</think>" if off else "")


def _text(content: str | Sequence[Mapping[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _string(message: Mapping[str, Any], key: str) -> str:
    value = message.get(key)
    return value if isinstance(value, str) else ""


def _calls(calls: Sequence[Mapping[str, Any]]) -> str:
    if not calls:
        return ""
    written = "".join(_call(index, call) for index, call in enumerate(calls))
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


def _call(index: int, call: Mapping[str, Any]) -> str:
    function = call["function"]
    # The id alone says which function is called, so one that is missing is made up in Kimi's own form.
    name = _string(call, "id") or f"functions.{function['name']}:{index}"
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"<|tool_call_begin|>{name}<|tool_call_argument_begin|>{text}<|tool_call_end|>"
