"""Sample whole chats from the model, tool calls included, and grade them.

The ids that the model sampled are kept as they are; a tool result is appended
to them, never is a chat encoded again.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from chat import GENERATION_PROMPT, render, tool_result
from task import CALCULATOR_TOOL, calculate
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM
from vocabulary import END_OF_TEXT, TURN_END

CALL = re.compile(r"<tool_call>\n(.*)\n</tool_call>$", re.DOTALL)
ANSWER = re.compile(r"The answer is (-?\d+)\.")
MAX_TURNS = 4


@dataclass
class Rollout:
    """One chat under way: its ids, and the outcome once it is over."""

    label: str
    ids: list[int]
    turns: list[str] = field(default_factory=list)
    outcome: str = ""


def run_rollouts(
    model: Qwen3ForCausalLM,
    tokenizer: Tokenizer,
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
        text = render(line["prompt"], [CALCULATOR_TOOL]) + GENERATION_PROMPT
        ids = tokenizer.encode(text).ids
        rollouts += [Rollout(line["label"], list(ids)) for _ in range(samples)]
    for _ in range(MAX_TURNS):
        waiting = [rollout for rollout in rollouts if not rollout.outcome]
        for at in range(0, len(waiting), 64):
            _sample_turn(model, tokenizer, waiting[at : at + 64], max_tokens)
        for rollout in waiting:
            _take_turn(tokenizer, rollout)
    for rollout in rollouts:
        rollout.outcome = rollout.outcome or "too many turns"
    return rollouts


def success_rate(rollouts: list[Rollout]) -> float:
    return sum(rollout.outcome == "right" for rollout in rollouts) / len(rollouts)


def outcomes(rollouts: list[Rollout]) -> dict[str, int]:
    return dict(Counter(rollout.outcome for rollout in rollouts).most_common())


@torch.no_grad()
def _sample_turn(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, batch: list[Rollout], max_tokens: int
) -> None:
    """Extend each chat by one turn of the model, up to its end token or `max_tokens`."""
    pad, end = tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(TURN_END)
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
    for rollout, row in zip(batch, output[:, width:].tolist(), strict=True):
        new = row[: row.index(end) + 1] if end in row else row
        rollout.ids += new
        rollout.turns.append(tokenizer.decode(new, skip_special_tokens=False))


def _take_turn(tokenizer: Tokenizer, rollout: Rollout) -> None:
    """Answer the turn's tool call, or grade the chat."""
    turn = rollout.turns[-1]
    if not turn.endswith(TURN_END):
        rollout.outcome = "cut off"
        return
    content = turn.removesuffix(TURN_END).partition("</think>\n\n")[2]
    if call := CALL.match(content):
        result = _call(call[1])
        rollout.ids += tokenizer.encode("\n" + tool_result(result) + GENERATION_PROMPT).ids
    elif answer := ANSWER.fullmatch(content):
        rollout.outcome = "right" if answer[1] == rollout.label else "wrong"
    else:
        rollout.outcome = "malformed"


def _call(text: str) -> str:
    try:
        return calculate(json.loads(text)["arguments"]["expression"])
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error}"
