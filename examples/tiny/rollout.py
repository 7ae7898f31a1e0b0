"""Sample whole chats from the model, tool calls included, and grade them.

The ids that the model sampled are kept as they are; a tool result is appended
to them, never is a chat encoded again.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from task import TOOLS
from transformers import Qwen3ForCausalLM

from miles_agents.calculator import ANSWER, MAX_TURNS, calculate, grade
from miles_core.tito import BoundFamily


@dataclass
class Rollout:
    """One chat under way: its ids, and the outcome once it is over."""

    label: str
    ids: list[int]
    outcome: str = ""


def run_rollouts(
    model: Qwen3ForCausalLM,
    family: BoundFamily,
    prompts: list[dict[str, Any]],
    samples: int,
    *,
    seed: int,
    max_tokens: int = 160,
) -> list[Rollout]:
    """`samples` rollouts of every prompt, at temperature 1."""
    torch.manual_seed(seed)
    rollouts = []
    for line in prompts:
        ids = family.encode(family.render(line["prompt"], TOOLS))
        rollouts += [Rollout(line["label"], list(ids)) for _ in range(samples)]
    for _ in range(MAX_TURNS):
        waiting = [rollout for rollout in rollouts if not rollout.outcome]
        for at in range(0, len(waiting), 64):
            batch = waiting[at : at + 64]
            for rollout, new in zip(batch, _sample(model, batch, max_tokens), strict=True):
                rollout.ids += new
                _take_turn(family, rollout, new)
    for rollout in rollouts:
        rollout.outcome = rollout.outcome or "too many turns"
    return rollouts


def success_rate(rollouts: list[Rollout]) -> float:
    return sum(rollout.outcome == "right" for rollout in rollouts) / len(rollouts)


def outcomes(rollouts: list[Rollout]) -> dict[str, int]:
    return dict(Counter(rollout.outcome for rollout in rollouts).most_common())


def _sample(model: Qwen3ForCausalLM, batch: list[Rollout], max_tokens: int) -> list[list[int]]:
    """One turn of the model for each chat: to its end token, or `max_tokens` ids."""
    pad, end = model.config.pad_token_id, model.config.eos_token_id
    width = max(len(rollout.ids) for rollout in batch)
    lengths = torch.tensor([[len(rollout.ids)] for rollout in batch])
    padded = [[pad] * (width - len(rollout.ids)) + rollout.ids for rollout in batch]
    output = model.generate(
        torch.tensor(padded),
        attention_mask=(torch.arange(width) >= width - lengths).long(),
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        max_new_tokens=max_tokens,
        eos_token_id=end,
        pad_token_id=pad,
    )
    rows = output[:, width:].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def _take_turn(family: BoundFamily, rollout: Rollout, new: list[int]) -> None:
    """Answer the turn's tool calls, or grade the chat."""
    message = family.parse(new, TOOLS)
    if new[-1] not in family.stop_ids:
        rollout.outcome = "cut off"
    elif calls := message.get("tool_calls"):
        results = [{"role": "tool", "content": _run_call(call)} for call in calls]
        suffix = family.encode(family.render_suffix(message, results, TOOLS))
        kept, bridge = family.join(rollout.ids, suffix)
        rollout.ids = rollout.ids[:kept] + bridge + suffix
    elif grade(message, rollout.label):
        rollout.outcome = "right"
    else:
        rollout.outcome = "wrong" if ANSWER.search(message["content"] or "") else "malformed"


def _run_call(call: dict[str, Any]) -> str:
    try:
        return calculate(json.loads(call["function"]["arguments"])["expression"])
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error}"
