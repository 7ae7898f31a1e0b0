"""What a family's join costs, in microseconds, after histories of 10, 100 and 1000 turns.

Run by `make bench`; a test holds every family to the bar. A join is what a later turn does for its prompt: render the
appended messages, tokenize them, and meet the checkpoint. It must not depend on the history.
"""

from __future__ import annotations

import sys
import time
from array import array
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.golden import golden_family, golden_names, installed_family, real_tokenizer
from miles_core.tito import BoundFamily, ChatTemplate

TURNS = (10, 100, 1000)
BAR = 1.2
"""How much more a join may cost after the longest history than after the shortest."""
REPEATS = 200
CALL = {"id": "functions.look:0", "type": "function", "function": {"name": "look", "arguments": '{"at": "the sea"}'}}
GENERATION: dict[str, Any] = {"role": "assistant", "content": "I look.", "reasoning_content": "r", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "functions.look:0", "name": "look", "content": "calm sea, light wind " * 10}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}]
CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""What the family `default` is measured with: it has no template of its own."""

FAMILIES = (*golden_names(), "default")


def family_of(name: str) -> BoundFamily:
    """A family, or `family@revision`, with its checkpoints' tokenizer."""
    if name != "default":
        return golden_family(name)
    template = ChatTemplate(CHATML, source="the benchmark's ChatML")
    return installed_family(name).bind(real_tokenizer("qwen3"), template=template)


def seconds_per_join(family: BoundFamily) -> list[float]:
    """Per history length, the quickest of many; taken in turns, so that a busy machine slows all alike."""
    turn = family.encode(family.render([{"role": "user", "content": "u"}, GENERATION], None, {}, False))
    checkpoints = [array("i", turn * turns) for turns in TURNS]
    best = [float("inf")] * len(TURNS)
    for _ in range(REPEATS):
        for at, checkpoint in enumerate(checkpoints):
            began = time.perf_counter()
            suffix = family.encode(family.render_suffix(GENERATION, [RESULT], TOOLS, {}))
            family.join(checkpoint, suffix)
            best[at] = min(best[at], time.perf_counter() - began)
    return best


def main() -> int:
    """Print the table; exit code 1 if a family's cost grows by more than the bar."""
    print(f"{'FAMILY':<20}" + "".join(f"{f'{turns} turns':>14}" for turns in TURNS) + "    (µs per join)")
    worst = 0.0
    for name in FAMILIES:
        costs = [seconds * 1e6 for seconds in seconds_per_join(family_of(name))]
        worst = max(worst, costs[-1] / costs[0])
        print(f"{name:<20}" + "".join(f"{cost:>14.0f}" for cost in costs))
    print(f"1000 turns against 10: at most {worst:.2f} ×, the bar is {BAR:.2f} ×")
    return 1 if worst > BAR else 0


if __name__ == "__main__":
    sys.exit(main())
