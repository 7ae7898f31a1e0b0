"""The generate function for benchmarks: answers of random length, end-of-turn tokens ignored.

With a seed (`--seed`) each sample's length is the same in every run. A sample that goes on keeps its length.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from typing import Any

from miles_core.errors import ConfigError
from miles_core.types import GenerateFnInput, GenerateFnOutput
from miles_generators import single_turn

KEY = "random_length"
"""Where a sample's metadata has the length that was drawn for it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The range of lengths."""
    parser.add_argument("--generate-min-length", type=int, default=1, metavar="N", help="Shortest answer, in tokens.")
    parser.add_argument("--generate-max-length", type=int, default=1024, metavar="N", help="Longest answer, in tokens.")


async def generate(input: GenerateFnInput) -> GenerateFnOutput:
    """Sample exactly as many tokens as were drawn, or as fit into the context."""
    length = input.sample.metadata.setdefault(KEY, draw(input))
    params = {**input.sampling_params, "ignore_eos": True, "min_new_tokens": None, "max_new_tokens": length}
    return await single_turn.generate(replace(input, sampling_params=params))


def draw(input: GenerateFnInput) -> int:
    """A length in the range, both ends included. Raises ConfigError for a range that has none."""
    low, high = _bound(input.args, "generate_min_length", 1), _bound(input.args, "generate_max_length", 1024)
    if not 1 <= low <= high:
        raise ConfigError(
            f"--generate-min-length {low} --generate-max-length {high}: expected 1 <= shortest <= longest"
        )
    seed = input.sampling_params.get("sampling_seed")
    source = random.Random() if seed is None else random.Random(f"{seed}/{input.sample.index}")
    return source.randint(low, high)


def _bound(args: Any, name: str, default: int) -> int:
    value = getattr(args, name, None)
    return default if value is None else int(value)
