"""The tiny model's tool as a tool loop's module: `TOOLS`, and what runs a call."""

from __future__ import annotations

from typing import Any

from miles_agents.calculator import CALCULATOR_TOOL, calculate

TOOLS = [CALCULATOR_TOOL]


async def execute(name: str, arguments: dict[str, Any]) -> str:
    """The value of an expression."""
    return calculate(arguments["expression"])
