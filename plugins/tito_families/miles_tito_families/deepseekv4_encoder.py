"""The prompt format of DeepSeek V4, append-only: every assistant turn keeps its reasoning.

Tool results are user turns: a run of user and tool messages is one user block, its parts joined by an empty line.
SGLang's older encoder and DeepSeek's own package differ in details; this is the first, `deepseekv4_recipe` the second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

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

TOOLS = """

## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> \
BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{schemas}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""

ABSOLUTE_MAXIMUM = """Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, \
rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, \
and rejected hypothesis to ensure absolutely no assumption is left unchecked.

"""


class DeepseekV4Encoder:
    """Writes V4 conversations as the encoder in SGLang 0.5.14 does.

    A user block ends with the assistant's opener, and an assistant turn continues from there. Only a block at the end
    or before an assistant turn has one.
    """

    source = "miles_tito_families.deepseekv4_encoder"
    known_roles = "system, developer, user, assistant and tool"

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        kwargs: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The text of a conversation. Raises RenderError for roles that have no place in it."""
        thinking = wants_thinking(kwargs)
        schemas = TOOLS.replace("{schemas}", tool_schemas(tools)) if tools else ""
        leading_system = bool(messages) and messages[0]["role"] == "system"
        blocks = list(_blocks(messages))
        out = [BOS, ABSOLUTE_MAXIMUM if thinking and kwargs.get("reasoning_effort") == "max" else ""]
        out.append("" if leading_system else schemas)
        for number, block in enumerate(blocks):
            out.append(self._block(block, thinking))
            out.append(schemas if number == 0 and leading_system else "")
            last = number + 1 == len(blocks)
            if block.opens_turn and (add_generation_prompt if last else blocks[number + 1].role == "assistant"):
                out.append(f"{ASSISTANT}{THINK if thinking else END_THINK}")
        return "".join(out)

    def _block(self, block: _Block, thinking: bool) -> str:
        message = block.messages[0]
        if block.role == "system":
            return str(message["content"])
        if block.role == "developer":
            return f"{USER}{developer_text(message, self.source, block.start)}"
        if block.role == "user":
            return f"{USER}{_user_text(block)}"
        if block.role == "assistant":
            reasoning = f"{message.get('reasoning_content') or ''}{END_THINK}" if thinking else ""
            return f"{reasoning}{message['content']}{tool_calls(message, 'tool_calls')}{EOS}"
        raise unknown_role(self.source, block.start, block.role, self.known_roles)


class _Block:
    """Messages that are written as one, where they start, and the calls that their results answer."""

    def __init__(self, role: str, start: int, messages: list[Message], calls: Sequence[Mapping[str, Any]]) -> None:
        self.role = role
        self.start = start
        self.messages = messages
        self._order = {call["id"]: place for place, call in enumerate(calls) if _is_id(call.get("id"))}

    def place_of(self, result: Message) -> int:
        """Which call a result answers. One whose id no call has comes with the first's, as in the encoders in use."""
        call_id = result.get("tool_call_id")
        return self._order.get(call_id, 0) if _is_id(call_id) else 0

    @property
    def opens_turn(self) -> bool:
        """Whether an assistant turn may follow it."""
        return self.role in ("user", "developer")


def _is_id(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and value != ""


def _blocks(messages: Sequence[Message]) -> Iterator[_Block]:
    """A conversation's blocks: runs of user and tool messages, and every other message by itself."""
    calls: Sequence[Mapping[str, Any]] = ()
    start = 0
    while start < len(messages):
        role, end = messages[start]["role"], start + 1
        if role in ("user", "tool"):
            role = "user"
            while end < len(messages) and messages[end]["role"] in ("user", "tool"):
                end += 1
        if role == "assistant":
            calls = messages[start].get("tool_calls") or ()
        yield _Block(role, start, list(messages[start:end]), calls)
        start = end


def _user_text(block: _Block) -> str:
    """A user block's text: results in the order of their calls, in the places where results stand."""
    results = [m for m in block.messages if m["role"] == "tool"]
    ordered = iter(sorted(results, key=block.place_of))
    return "\n\n".join(
        f"<tool_result>{next(ordered)['content']}</tool_result>" if m["role"] == "tool" else m["content"]
        for m in block.messages
    )
