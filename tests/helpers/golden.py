"""The golden vectors in `tests/data/golden`, the tokenizers they were made with, and the families as installed."""

from __future__ import annotations

import gzip
import json
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from miles_core.tito import BoundFamily, TitoFamily, Tokenizer, load_tokenizer
from real_tokenizers import checkpoint

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


def served(row: Row) -> str:
    """The text that the family must give: as the checkpoint's tokenizer class serves it, where that differs."""
    text: str = row.get("rendered_hf_tokenizer") or row["rendered"]
    return text


def has_ids(row: Row) -> bool:
    """Whether the row's ids and joins belong to the text that is served."""
    return "rendered" in row and served(row) == row["rendered"]


def real_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that a family's (or revision's) checkpoints have, with the real ids."""
    return _loaded(tokenizer_name(name))


@cache
def _loaded(tokenizer: str) -> Tokenizer:
    return load_tokenizer(checkpoint(tokenizer))


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
    installed = installed_family(family)
    return installed.bind(real_tokenizer(name), revision or installed.revisions[0].name)
