"""The prompt format of DeepSeek V3.2, append-only: every assistant turn keeps its reasoning.

A user turn ends with the assistant's opener and a run of results with the tag that opens or skips reasoning; an
assistant turn continues from there. The opener is written wherever such a turn stands, not only at the end, so that
what follows never changes what was written. Without a generation prompt the last one is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles_core.errors import RenderError
from miles_core.types import Message, Tool
from miles_tito_families.deepseek_dsml import (
    ASSISTANT,
    BOS,
    END_THINK,
    EOS,
    THINK,
    USER,
    developer_text,
    tool_calls,
    tool_schemas,
    unknown_role,
    wants_thinking,
)

_TOOLS = """

## Tools
You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part of your reply to the \
user:
<｜DSML｜function_calls>
<｜DSML｜invoke name="$FUNCTION_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$FUNCTION_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜function_calls>
String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should \
use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types \
(numbers, booleans, arrays, objects).
If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. \
Here is an example:
<｜DSML｜function_calls>
...
</｜DSML｜function_calls>
<function_results>
...
</function_results>
<think>...thinking about results</think>
Here are the functions available in JSONSchema format:
<functions>
{schemas}
</functions>
"""


class DeepseekV32Encoder:
    """Writes V3.2 conversations."""

    source = "miles_tito_families.deepseekv32_encoder"

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        kwargs: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The text of a conversation. Raises RenderError for roles and tool results that have no place in it."""
        thinking = wants_thinking(kwargs)
        schemas = _TOOLS.replace("{schemas}", tool_schemas(tools)) if tools else ""
        leading_system = bool(messages) and messages[0]["role"] == "system"
        out = [BOS, "" if leading_system else schemas]
        opener = ""
        for index in range(len(messages)):
            text, opener = self._message(messages, index, thinking)
            out += [text, schemas if index == 0 and leading_system else "", opener]
        return "".join(out if add_generation_prompt else out[: len(out) - 1 if opener else None])

    def _message(self, messages: Sequence[Message], index: int, thinking: bool) -> tuple[str, str]:
        """A message's text, and what opens the assistant's turn behind it."""
        message = messages[index]
        role, content = message["role"], message["content"]
        tag = THINK if thinking else END_THINK
        if role == "system":
            return content, ""
        if role == "user":
            return f"{USER}{content}", f"{ASSISTANT}{tag}"
        if role == "developer":
            wrapped = f"\n\n# The user's message is: {developer_text(message, self.source, index)}"
            return f"{USER}{wrapped}", f"{ASSISTANT}{tag}"
        if role == "assistant":
            reasoning = f"{message.get('reasoning_content') or ''}{END_THINK}" if thinking else ""
            return f"{reasoning}{content}{tool_calls(message, 'function_calls')}{EOS}", ""
        if role == "tool":
            return self._result(messages, index, tag)
        raise unknown_role(self.source, index, role, "system, developer, user, assistant and tool")

    def _result(self, messages: Sequence[Message], index: int, tag: str) -> tuple[str, str]:
        """A result: the first of a run opens the block, the one that answers the last call closes it."""
        caller = index - 1
        while caller >= 0 and messages[caller]["role"] == "tool":
            caller -= 1
        calls = len(messages[caller].get("tool_calls") or []) if caller >= 0 else 0
        number = index - caller
        if caller < 0 or messages[caller]["role"] != "assistant" or number > calls:
            raise RenderError(
                f"{self.source} refused messages[{index}]: tool result {number} behind a turn with {calls} calls; "
                "a result must follow the assistant turn that called it"
            )
        header = "\n\n<function_results>" if number == 1 else ""
        body = f"{header}\n<result>{messages[index]['content']}</result>"
        return (f"{body}\n</function_results>", f"\n\n{tag}") if number == calls else (body, "")
