"""What the encoders of DeepSeek V3.2 and V4 share: the DSML tool markup, and the switch for thinking.

Both models come without a chat template; their prompts are written in Python. A call is an `invoke` element with one
`parameter` element a member: strings as they are (`string="true"`), other values as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from miles_core.errors import RenderError, RequestError
from miles_core.tito import BoundFamily, ElementCalls
from miles_core.types import Message, Tool

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"

THINKING_ALIASES = ("thinking", "enable_thinking", "thinking_mode")
"""Names of one setting: SGLang's, that of other families, and that of DeepSeek's own encoders."""

_MODES = {"thinking": True, "chat": False}


def wants_thinking(kwargs: Mapping[str, Any]) -> bool:
    """Whether the conversation is in thinking mode; it is unless a kwarg turns it off."""
    for name in THINKING_ALIASES:
        value = kwargs.get(name)
        if isinstance(value, str):
            if value not in _MODES:
                raise RequestError(f"chat_template_kwargs.{name}={value!r} is not known; say 'thinking' or 'chat'")
            return _MODES[value]
        if value is not None:
            return bool(value)
    return True


def tool_calls(message: Message, block: str) -> str:
    """An assistant's calls as a DSML block of that name, or nothing."""
    calls = message.get("tool_calls") or []
    if not calls:
        return ""
    invokes = "\n".join(_invoke(call.get("function") or call) for call in calls)
    return f"\n\n<｜DSML｜{block}>\n{invokes}\n</｜DSML｜{block}>"


def dsml_calls(block: str) -> ElementCalls:
    """How calls in a DSML block of that name are read."""
    return ElementCalls(
        opener=f"<｜DSML｜{block}>",
        closer=f"</｜DSML｜{block}>",
        call_start="<｜DSML｜invoke ",
        call_ends=("</｜DSML｜invoke>", "/>"),
        name=r'<｜DSML｜invoke name="(?P<name>[^"\n]+)">',
        parameter=r'<｜DSML｜parameter name="(?P<name>(?:(?!<｜DSML｜)[^\n])*?)" string="(?P<string>true|false)">',
        parameter_end="</｜DSML｜parameter>",
        end="</｜DSML｜invoke>",
        empty=r'<｜DSML｜invoke name="(?P<name>[^"\n]+)"\s*/>',  # as V4 samples it, though no encoder writes it
        damaged="<｜DSML｜parameter name=",
        tokens=(),
    )


def _invoke(function: Mapping[str, Any]) -> str:
    given = function.get("arguments")
    # Arguments that are no JSON object have no members: they become one parameter, as the text they are.
    members = given if isinstance(given, dict) else {"arguments": given if isinstance(given, str) else to_json(given)}
    parameters = "\n".join(_parameter(name, value) for name, value in members.items())
    return f'<｜DSML｜invoke name="{function.get("name")}">\n{parameters}\n</｜DSML｜invoke>'


def _parameter(name: str, value: Any) -> str:
    text, kind = (value, "true") if isinstance(value, str) else (to_json(value), "false")
    return f'<｜DSML｜parameter name="{name}" string="{kind}">{text}</｜DSML｜parameter>'


def tool_schemas(tools: Sequence[Tool]) -> str:
    """One line of JSON a tool: its function, keys in the client's order."""
    return "\n".join(to_json(tool.get("function", tool)) for tool in tools)


def to_json(value: Any) -> str:
    """JSON with spaces and without escapes for what is not ASCII."""
    return json.dumps(value, ensure_ascii=False)


def developer_text(message: Message, source: str, index: int) -> str:
    """A developer message's content. Raises RenderError if it is empty, which both encoders refuse."""
    if not message["content"]:
        raise RenderError(f"{source} refused messages[{index}]: a developer message needs content")
    return str(message["content"])


def unknown_role(source: str, index: int, role: object, known: str) -> RenderError:
    """What to raise for a role the format does not have."""
    return RenderError(f"{source} has no role {role!r} (messages[{index}]); it knows {known}")


class DeepseekBound(BoundFamily):
    """States `thinking` in every request's kwargs.

    SGLang's reasoning parsers for these models look at that kwarg alone and take its absence for off, while the
    encoders think unless told not to; unstated, the reasoning of every answer would come back as content.
    """

    def merge_kwargs(self, *layers: Mapping[str, Any] | None) -> dict[str, Any]:
        """The merged kwargs with `thinking` as a boolean."""
        merged = super().merge_kwargs(*layers)
        return {**merged, "thinking": wants_thinking(merged)}
