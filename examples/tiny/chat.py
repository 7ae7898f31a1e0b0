"""The Qwen3 chat layout with tools, thinking kept in every turn."""

from __future__ import annotations

import json
from typing import Any

TOOLS_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
GENERATION_PROMPT = "<|im_start|>assistant\n"


def tools_turn(tools: list[dict[str, Any]]) -> str:
    """The system turn that lists the tools."""
    lines = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
    return f"<|im_start|>system\n{TOOLS_HEAD}{lines}{TOOLS_TAIL}<|im_end|>\n"


def tool_result(text: str) -> str:
    """The turn that brings one tool result."""
    return f"<|im_start|>user\n<tool_response>\n{text}\n</tool_response><|im_end|>\n"


def message_turn(message: dict[str, Any]) -> str:
    """One message of the task: text, one tool result, or an assistant turn."""
    role, body = message["role"], message["content"]
    if role == "tool":
        return tool_result(body)
    if role == "assistant":
        body = f"<think>\n{message['reasoning_content']}\n</think>\n\n{body}"
        for call in message.get("tool_calls", ()):
            arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            name = call["function"]["name"]
            body += f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    return f"<|im_start|>{role}\n{body}<|im_end|>\n"


def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    """The whole chat as text."""
    return tools_turn(tools) + "".join(message_turn(message) for message in messages)
