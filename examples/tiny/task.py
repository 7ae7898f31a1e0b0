"""The task of the tiny model: integer expressions solved with a calculator tool.

One problem is `a op b` (one call) or three numbers with precedence or brackets
(two chained calls). A demonstration is a chat, in OpenAI form, that solves it.
"""

from __future__ import annotations

import random
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from miles_agents.calculator import CALCULATOR_TOOL, calculate

TOOLS = [CALCULATOR_TOOL]
QUESTIONS = ("What is {}?", "Compute {}.", "Calculate {}.", "How much is {}?")
ONLY_STEP = ("Compute {}.", "I need {}.", "This is {}.")
FIRST_STEP = ("First {}.", "Start with {}.", "Begin with {}.")
SECOND_STEP = ("Now {}.", "Then {}.", "Next {}.")
RESULT = ("The result is {}.", "I got {}.", "So it is {}.")
ANSWER = "The answer is {}."


@dataclass(frozen=True)
class Problem:
    """An expression and the operands in the order they stand in it.

    `first` is the index of the operator that is worked out first.
    """

    expression: str
    operands: tuple[int, ...]
    operators: tuple[str, ...]
    first: int

    @property
    def calls(self) -> int:
        return len(self.operators)

    @property
    def label(self) -> str:
        return calculate(self.expression)


def make_problem(rng: random.Random) -> Problem:
    """A random problem; two in three need two calls."""
    if rng.random() < 1 / 3:
        op = rng.choice("+-*")
        a, b = _operands(rng, (op,))
        return Problem(f"{a} {op} {b}", (a, b), (op,), 0)
    ops = (rng.choice("+-*"), rng.choice("+-*"))
    a, b, c = _operands(rng, ops)
    kind = rng.choice(("plain", "left", "right"))
    if kind == "left":
        return Problem(f"({a} {ops[0]} {b}) {ops[1]} {c}", (a, b, c), ops, 0)
    if kind == "right":
        return Problem(f"{a} {ops[0]} ({b} {ops[1]} {c})", (a, b, c), ops, 1)
    first = 1 if ops[1] == "*" and ops[0] != "*" else 0
    return Problem(f"{a} {ops[0]} {b} {ops[1]} {c}", (a, b, c), ops, first)


def _operands(rng: random.Random, ops: tuple[str, ...]) -> tuple[int, ...]:
    """Numbers to 99; small ones where a product is taken."""
    small = "*" in ops
    return tuple(rng.randint(2, 12) if small else rng.randint(1, 99) for _ in range(len(ops) + 1))


def demonstrate(problem: Problem, rng: random.Random, slip_rate: float = 0.0) -> list[dict[str, Any]]:
    """A chat that solves the problem; with `slip_rate`, one that goes wrong somewhere.

    A slip is a wrong first step, a miscopied digit in a call, or a misread result.
    """
    slips = ["call", "answer"] + ["order"] * (problem.calls == 2)
    slip = rng.choice(slips) if rng.random() < slip_rate else ""
    slip_turn = rng.randrange(problem.calls)
    first = 1 - problem.first if slip == "order" else problem.first
    values, ops = list(problem.operands), list(problem.operators)
    messages: list[dict[str, Any]] = [{"role": "user", "content": rng.choice(QUESTIONS).format(problem.expression)}]
    result = ""
    for turn in range(problem.calls):
        at = first if turn == 0 else 0
        step = f"{values[at]} {ops[at]} {values[at + 1]}"
        if slip == "call" and turn == slip_turn:
            step = change_digit(step, rng)
        phrases = ONLY_STEP if problem.calls == 1 else (FIRST_STEP, SECOND_STEP)[turn]
        result = calculate(step)
        messages.append(_call_message(rng.choice(phrases).format(step), step))
        messages.append({"role": "tool", "content": result})
        values[at : at + 2], ops[at : at + 1] = [int(result)], []
    if slip == "answer":
        result = change_digit(result, rng)
    reasoning = rng.choice(RESULT).format(result)
    messages.append({"role": "assistant", "reasoning_content": reasoning, "content": ANSWER.format(result)})
    return messages


def _call_message(reasoning: str, expression: str) -> dict[str, Any]:
    call = {"name": "calculator", "arguments": {"expression": expression}}
    return {
        "role": "assistant",
        "reasoning_content": reasoning,
        "content": "",
        "tool_calls": [{"type": "function", "function": call}],
    }


def change_digit(text: str, rng: random.Random) -> str:
    """The text with one of its digits replaced (never making a leading zero)."""
    at = rng.choice([i for i, char in enumerate(text) if char.isdigit()])
    return text[:at] + rng.choice([d for d in "123456789" if d != text[at]]) + text[at + 1 :]


def make_prompts(count: int, rng: random.Random, held_out: Container[str] = ()) -> list[dict[str, Any]]:
    """Prompts as the lines of `prompts.jsonl`: distinct expressions, none of them held out, each with its label."""
    problems: dict[str, Problem] = {}
    while len(problems) < count:
        problem = make_problem(rng)
        if problem.expression not in held_out:
            problems[problem.expression] = problem
    return [
        {
            "prompt": [{"role": "user", "content": rng.choice(QUESTIONS).format(problem.expression)}],
            "label": problem.label,
            "metadata": {"expression": problem.expression, "calls": problem.calls},
        }
        for problem in problems.values()
    ]
