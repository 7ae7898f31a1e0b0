"""Qwen3's tokenizer in small: its real ids, cut down by `tests/data/make_small_qwen3.py`."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path

import tokenizers

from miles_core.tito import BoundFamily, Tokenizer
from miles_tito_families.qwen3 import FAMILY

DATA = Path(__file__).parents[1] / "data"
VOCABULARY = 151_936
"""`vocab_size` of Qwen3's config."""

IM_START, IM_END, END_OF_TEXT = 151_644, 151_645, 151_643
NEWLINE = 198


@cache
def tokenizer_json() -> str:
    """The tokenizer's file."""
    return gzip.decompress((DATA / "small_qwen3.json.gz").read_bytes()).decode("utf-8")


@cache
def chat_tokenizer() -> Tokenizer:
    """The tokenizer with the model's vocabulary size."""
    backend = tokenizers.Tokenizer.from_str(tokenizer_json())
    return Tokenizer(backend, source="small qwen3", config={"vocab_size": VOCABULARY})


@cache
def chat_family() -> BoundFamily:
    """The qwen3 family on this tokenizer."""
    return FAMILY.bind(chat_tokenizer())


def write_checkpoint(directory: Path) -> Path:
    """A checkpoint directory without weights; returned."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(tokenizer_json(), "utf-8")
    (directory / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}), "utf-8")
    return directory


def encode(text: str) -> list[int]:
    """Ids of a text."""
    return chat_tokenizer().encode(text)


def decode(ids: list[int]) -> str:
    """Text of ids, special tokens spelled out."""
    return chat_tokenizer().decode(ids)
