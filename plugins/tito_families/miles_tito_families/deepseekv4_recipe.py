"""The prompt format of DeepSeek V4 as the `deepseek-recipe` package (0.2.0) writes it, made append-only.

The package is not used here. Facts of its format that differ from the older encoder's: system messages come first,
wherever they stood; an assistant turn writes its own opener, also at the start and behind another; a generation
prompt follows any message; users' messages in a row are one, without the empty ones; results are sorted only once as
many messages as calls follow; an `invoke` without arguments has no empty line; a tool is its name, description and
parameters, present or not; efforts other than low have a preamble, and `latest_reminder` is a role.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from miles_core.types import Message, Tool
from miles_tito_families.deepseek_dsml import (
    ASSISTANT,
    BOS,
    END_THINK,
    EOS,
    THINK,
    USER,
    to_json,
    unknown_role,
    wants_thinking,
)
from miles_tito_families.deepseekv4_encoder import ABSOLUTE_MAXIMUM, TOOLS

_REMINDER = "<｜latest_reminder｜>"

_BEYOND_MAXIMUM = """Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.
You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the \
problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying cause \
rather than any surface symptom.
Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that no \
assumption remains unchecked and no error remains undiscovered.

"""

_PREAMBLES = {"low": "", "minimal": "", "max": _BEYOND_MAXIMUM, "ultra": _BEYOND_MAXIMUM}
"""By effort; every other has the older encoder's."""


class DeepseekV4Recipe:
    """Writes V4 conversations as the package does on a first turn."""

    source = "miles_tito_families.deepseekv4_recipe"

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
        effort = str(kwargs.get("reasoning_effort"))
        out = [BOS, _PREAMBLES.get(effort, ABSOLUTE_MAXIMUM) if thinking else ""]
        out.append("\n\n".join(m["content"] for m in messages if m["role"] == "system" and m["content"]))
        out.append(TOOLS.replace("{schemas}", "\n".join(map(_schema, tools))) if tools else "")
        rest = _merged_users([(i, m) for i, m in enumerate(messages) if m["role"] != "system"])
        for block in _blocks(_sorted_results(rest)):
            out.append(self._block(block, keep=bool(tools), thinking=thinking))
        if add_generation_prompt:
            out.append(f"{ASSISTANT}{THINK if thinking else END_THINK}")
        return "".join(out)

    def _block(self, block: Sequence[_Placed], *, keep: bool, thinking: bool) -> str:
        index, message = block[0]
        role = message["role"]
        if role in ("user", "tool"):
            return f"{USER}{_user_text([m for _, m in block])}"
        if role == "assistant":
            return f"{ASSISTANT}{_reasoning(message, keep, thinking)}{message['content']}{_calls(message)}{EOS}"
        if role == "latest_reminder":
            return f"{_REMINDER}{message['content']}"
        raise unknown_role(self.source, index, role, "system, user, assistant, tool and latest_reminder")


_Placed = tuple[int, Message]
"""A message and its index in the request."""


def _merged_users(rest: list[_Placed]) -> list[_Placed]:
    """Users' messages that follow each other are one message, before results are sorted."""
    out: list[_Placed] = []
    for index, message in rest:
        if out and message["role"] == out[-1][1]["role"] == "user":
            first, before = out.pop()
            said = "\n\n".join(filter(None, (before["content"], message["content"])))
            index, message = first, {**before, "content": said}
        out.append((index, message))
    return out


def _sorted_results(rest: list[_Placed]) -> list[_Placed]:
    """Behind each turn of n calls, the next n messages in the order of its calls; what is no result comes last.

    Only once n have come. The package puts the calls, too, in the order of their ids, and sorts across assistant
    turns; both rewrite what was sampled, so here calls stay and a result takes its call's place.
    """
    out = list(rest)
    for place, (_, message) in enumerate(rest):
        calls = message.get("tool_calls") or () if message["role"] == "assistant" else ()
        window = out[place + 1 : place + 1 + len(calls)]
        if calls and len(window) == len(calls) and all(m["role"] != "assistant" for _, m in window):
            ids = [str(call.get("id") or "") for call in calls]
            out[place + 1 : place + 1 + len(calls)] = sorted(window, key=lambda placed: _result_key(placed[1], ids))
    return out


def _result_key(message: Message, ids: Sequence[str]) -> tuple[bool, int, bool, str]:
    """By the place of its call; a result without one where its id would be, were the calls sorted by id."""
    if message["role"] != "tool":
        return True, 0, False, ""
    own = str(message.get("tool_call_id") or "")
    if own in ids:
        return False, ids.index(own), True, ""
    return False, sum(i < own for i in ids), False, own


def _blocks(rest: Sequence[_Placed]) -> Iterator[list[_Placed]]:
    """Results and the user messages behind them as one, every other message by itself."""
    block: list[_Placed] = []
    for placed in rest:
        role, before = placed[1]["role"], block[-1][1]["role"] if block else None
        if (before, role) in (("tool", "tool"), ("tool", "user"), ("user", "user")):
            block.append(placed)
            continue
        if block:
            yield block
        block = [placed]
    if block:
        yield block


def _user_text(messages: Sequence[Message]) -> str:
    return "\n\n".join(
        f"<tool_result>{m['content']}</tool_result>" if m["role"] == "tool" else m["content"] for m in messages
    )


def _reasoning(message: Message, keep: bool, thinking: bool) -> str:
    """An assistant's reasoning block.

    With tools the package keeps every block, with thinking off too; without tools it drops them all, which would
    rewrite sampled turns, so in thinking mode ours stay.
    """
    reasoning = message.get("reasoning_content")
    if reasoning is None or not (keep or (thinking and reasoning)):
        return END_THINK
    return f"{THINK}{reasoning}{END_THINK}"


def _calls(message: Message) -> str:
    calls = message.get("tool_calls") or []
    invokes = "".join(f"{_invoke(call.get('function') or call)}\n" for call in calls)
    return f"\n\n<｜DSML｜tool_calls>\n{invokes}</｜DSML｜tool_calls>" if calls else ""


def _invoke(function: Mapping[str, Any]) -> str:
    given = function.get("arguments")
    members = given if isinstance(given, dict) else {"arguments": given if isinstance(given, str) else _json(given)}
    lines = "".join(f"{_parameter(name, value)}\n" for name, value in members.items())
    return f'<｜DSML｜invoke name="{function.get("name")}">\n{lines}</｜DSML｜invoke>'


def _parameter(name: str, value: Any) -> str:
    text, kind = (value, "true") if isinstance(value, str) else (_json(value), "false")
    return f'<｜DSML｜parameter name="{name}" string="{kind}">{text}</｜DSML｜parameter>'


def _schema(tool: Tool) -> str:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return _json(tool)
    written = {"name": function.get("name"), "description": function.get("description") or ""}
    return _json({**written, "parameters": function.get("parameters")})


def _json(value: Any) -> str:
    """JSON as the package writes it: Python's spacing, numbers as Rust prints them."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{to_json(str(k))}: {_json(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_json, value)) + "]"
    return _number(value) if isinstance(value, float) else to_json(value)


def _number(value: float) -> str:
    """A float: Python's shortest digits, the exponent without leading zero and only below 1e-5 or from 1e16."""
    digits, exponential, exponent = to_json(value).partition("e")
    if not exponential:
        return digits
    if exponent == "-05":
        sign, digits = ("-", digits[1:]) if digits.startswith("-") else ("", digits)
        return f"{sign}0.0000{digits.replace('.', '')}"
    return f"{digits}e{exponent[0] if exponent[0] == '-' else '+'}{exponent[1:].lstrip('0')}"
