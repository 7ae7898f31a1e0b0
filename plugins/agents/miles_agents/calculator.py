"""An agent that solves integer arithmetic with a calculator tool, over the OpenAI client."""

from __future__ import annotations

import ast
import json
import operator
import re
import time
from collections.abc import Callable
from typing import Any

from miles_agents import chat
from miles_core.types import Message

CALCULATOR_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an integer expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}

MAX_TURNS = 8
MAX_EXPRESSION = 1000
"""Characters."""
MAX_BITS = 4096
"""Of any intermediate value: a longer product is refused, not computed."""

ANSWER = re.compile(r"The answer is (-?\d+)\.")

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


async def run_agent(
    base_url: str,
    prompt: list[Message],
    request_kwargs: dict[str, Any],
    metadata: dict[str, Any],
    **kwargs: Any,
) -> dict[str, Any]:
    """Solve the prompt's task; the reward is 1.0 if the final answer is the label, else 0.0."""
    messages = list(prompt)
    turns, tool_time = 0, 0.0
    async with chat.client_of(base_url, chat.key_of(kwargs, metadata), agent="calculator") as client:
        while turns < MAX_TURNS:
            message, _ = await chat.ask(client, messages, [CALCULATOR_TOOL], request_kwargs)
            turns += 1
            messages.append(message)
            calls = message.get("tool_calls")
            if not calls:
                break
            started = time.perf_counter()
            messages += [_answer_call(call) for call in calls]
            tool_time += time.perf_counter() - started
    return {
        "reward": grade(messages[-1], metadata.get("label")),
        "turns": turns,
        "agent_metrics": {"total_tool_time": tool_time},
    }


def _answer_call(call: dict[str, Any]) -> Message:
    return {"role": "tool", "tool_call_id": call.get("id", ""), "content": _run_call(call)}


def _run_call(call: dict[str, Any]) -> str:
    function = call.get("function") or {}
    if function.get("name") != "calculator":
        return f"error: no tool is named {function.get('name')}"
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (ValueError, RecursionError):
        return "error: the arguments are not JSON"
    expression = arguments.get("expression") if isinstance(arguments, dict) else None
    if not isinstance(expression, str):
        return "error: expression must be a string"
    return calculate(expression)


def calculate(expression: str) -> str:
    """The value as plain text, or `error: …`: integers, + - *, unary minus and brackets, of bounded size."""
    if len(expression) > MAX_EXPRESSION:
        return f"error: longer than {MAX_EXPRESSION} characters"
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        return f"error: {reason or type(error).__name__}"


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _bounded(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError("only integers with + - * and brackets")


def _bounded(value: int) -> int:
    if value.bit_length() > MAX_BITS:
        raise ValueError("the number is too large")
    return value


def grade(message: Message, label: object) -> float:
    """1.0 if the message ends the task with the sentence `The answer is N.` and N is the label."""
    if message.get("role") != "assistant" or message.get("tool_calls"):
        return 0.0
    content = message.get("content")
    answers = ANSWER.findall(content) if isinstance(content, str) else []
    return 1.0 if answers and label is not None and answers[-1] == str(label).strip() else 0.0
