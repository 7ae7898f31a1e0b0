"""The golden vectors in `tests/data/golden`, the small tokenizers they need, and the families as installed."""

from __future__ import annotations

import gzip
import json
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import tokenizers

from miles_core.tito import BoundFamily, TitoFamily, Tokenizer

DATA = Path(__file__).parents[1] / "data"
GROUP = "miles.tito_families"

TOKENIZER_OF = {
    "qwennext": "qwen3",
    "kimi25": "kimi",
    "kimi26": "kimi",
    "minimax_m25": "minimax",
    "minimax_m27": "minimax",
}
"""Families that do not have a tokenizer of their own name. Revisions share their family's."""

Row = dict[str, Any]


def golden_names() -> list[str]:
    """`family` or `family@revision` of every file of vectors."""
    return sorted(path.name.removesuffix(".jsonl.gz") for path in (DATA / "golden").glob("*.jsonl.gz"))


@cache
def golden_rows(name: str) -> tuple[Row, ...]:
    """The vectors of a family or revision."""
    with gzip.open(DATA / "golden" / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        return tuple(json.loads(line) for line in file)


def tokenizer_name(name: str) -> str:
    """The tokenizer that a family's (or revision's) vectors were made with."""
    family = name.partition("@")[0]
    return TOKENIZER_OF.get(family, family)


def texts_of(row: Row) -> list[str]:
    """Everything of a row that is ever encoded: whole texts, and pieces that are encoded alone."""
    whole = [row[key] for key in ("rendered", "rendered_hf_tokenizer") if row.get(key)]
    completions = [part["text"] for part in row.get("completions", []) if part.get("text")]
    increments = [part["incremental_text"] for part in row.get("junctions", []) if part.get("incremental_text")]
    return [*whole, *completions, *increments]


@cache
def small_tokenizer(name: str) -> Tokenizer:
    """A checkpoint's tokenizer with its real ids, cut down by `tests/data/make_small_tokenizers.py`."""
    text = gzip.decompress((DATA / "tokenizers" / f"{name}.json.gz").read_bytes()).decode("utf-8")
    return Tokenizer(tokenizers.Tokenizer.from_str(text), source=f"small {name}")


def installed_family(name: str) -> TitoFamily:
    """A family through its entry point. Raises LookupError if no distribution brings it."""
    found = entry_points(group=GROUP, name=name)
    if not found:
        raise LookupError(f"no entry point {name!r} in {GROUP}; add it to pyproject.toml and install again")
    family = next(iter(found)).load().tito_family()
    assert isinstance(family, TitoFamily)
    return family


@cache
def golden_family(name: str) -> BoundFamily:
    """The family (or `family@revision`) bound to the tokenizer of its vectors."""
    family, _, revision = name.partition("@")
    return installed_family(family).bind(small_tokenizer(tokenizer_name(name)), revision or None)
