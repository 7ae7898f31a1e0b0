"""The prompt format of DeepSeek V4 as the `deepseek-recipe` package (0.2.0) writes it, made append-only.

The package is not used here. Facts of its format that differ from the older encoder's: system messages come first,
wherever they stood; an assistant turn writes its own opener, also at the start and behind another; a generation
prompt follows any message; results are sorted by their id as text, and only once as many messages as calls follow;
users' empty messages are left out; an `invoke` without arguments has no empty line; a tool is its name, description
and parameters, present or not; efforts other than low have a preamble, and `latest_reminder` is a role.
"""

from __future__ import annotations

import json
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

_PREAMBLES = {"low": "", "minimal": "", "max": _BEYOND_MAXIMUM}


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
        rest = _sorted_results([(i, m) for i, m in enumerate(messages) if m["role"] != "system"])
        for number, (index, message) in enumerate(rest):
            before = rest[number - 1][1]["role"] if number else None
            out.append(self._message(index, message, before, keep=bool(tools), thinking=thinking))
        if add_generation_prompt:
            out.append(f"{ASSISTANT}{THINK if thinking else END_THINK}")
        return "".join(out)
