"""Demonstrations as text and ids, by the product's own `qwen3` family."""

from __future__ import annotations

import random

import tokenizers
from task import TOOLS, demonstrate, make_problem

from miles_core.tito import BoundFamily, Tokenizer
from miles_tito_families.qwen3 import FAMILY

GENERATION_PROMPT = "<|im_start|>assistant\n"


def bind(tokenizer: tokenizers.Tokenizer) -> BoundFamily:
    """The `qwen3` family on a tokenizer that need not be on disk."""
    return FAMILY.bind(Tokenizer(tokenizer, source="examples/tiny"))


def make_chat(family: BoundFamily, rng: random.Random, slip_rate: float, held_out: set[str]) -> str:
    """The text of one demonstration whose expression is not held out."""
    problem = make_problem(rng)
    while problem.expression in held_out:
        problem = make_problem(rng)
    return family.render(demonstrate(problem, rng, slip_rate), TOOLS, add_generation_prompt=False)


def shared_start(family: BoundFamily) -> list[int]:
    """The ids that every chat begins with: the turn that lists the tools."""
    question = [{"role": "user", "content": ""}]
    alone = family.render(question, None, add_generation_prompt=False)
    return family.encode(family.render(question, TOOLS, add_generation_prompt=False).removesuffix(alone))


def mark_sampled(ids: list[int], opening: list[int], end: int) -> list[bool]:
    """Which ids the model samples: from each generation prompt to the end token."""
    marks, inside = [], False
    for at, token in enumerate(ids):
        inside = inside or ids[max(at - len(opening), 0) : at] == opening
        marks.append(inside)
        inside = inside and token != end
    return marks
