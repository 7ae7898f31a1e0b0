"""Make `small_qwen3.json.gz`: Qwen3's tokenizer cut down to what the texts in `golden/qwen3.jsonl.gz` need.

Ids are Qwen3's own. Every byte token, every added token and every merge that encoding one of the texts goes
through is kept, so that those texts encode exactly as with the whole tokenizer, and any other text still encodes.

Usage: python make_small_qwen3.py FULL_TOKENIZER_JSON
"""

from __future__ import annotations

import gzip
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

HERE = Path(__file__).parent
EXTRA = "HAVING having\n\n\n The quick brown fox jumps over the lazy dog. 0123456789"
"""Tests want a merge or two that the golden texts do not use."""


def golden_texts() -> Iterator[str]:
    """Everything that a golden row has ids for, and the pieces that are encoded alone."""
    with gzip.open(HERE / "golden" / "qwen3.jsonl.gz", "rt", encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            yield row["rendered"]
            for part in row.get("completions", []):
                yield part["text"] or ""
            for part in row.get("junctions", []):
                yield part["incremental_text"]
                yield row["rendered"][: part["prefix_chars"]]
    yield EXTRA


def merges_on_the_way(word: str, ranks: dict[tuple[str, str], int]) -> Iterator[tuple[str, str]]:
    """The merges that byte-pair encoding of one pre-token applies, in order."""
    parts = list(word)
    while len(parts) > 1:
        pairs = list(itertools.pairwise(parts))
        best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
        if best not in ranks:
            return
        yield best
        merged, at = [], 0
        while at < len(parts):
            if at + 1 < len(parts) and (parts[at], parts[at + 1]) == best:
                merged.append(parts[at] + parts[at + 1])
                at += 2
            else:
                merged.append(parts[at])
                at += 1
        parts = merged


def words_of(full: tokenizers.Tokenizer, texts: list[str], added: list[str]) -> set[str]:
    """The pre-tokens of the texts, between added tokens."""
    words: set[str] = set()
    for text in texts:
        pieces = [full.normalizer.normalize_str(text) if full.normalizer else text]
        for token in added:
            pieces = [part for piece in pieces for part in piece.split(token)]
        words.update(word for piece in pieces for word, _ in full.pre_tokenizer.pre_tokenize_str(piece))
    return words


def reduced(path: Path, texts: list[str]) -> dict[str, Any]:
    """A byte-level BPE tokenizer's JSON, cut down to what the texts need."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    full = tokenizers.Tokenizer.from_file(str(path))
    model = data["model"]
    pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
    merges: list[tuple[str, str]] = [(left, right) for left, right in pairs]
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    added = [token["content"] for token in data["added_tokens"]]
    used = {m for word in words_of(full, texts, added) for m in merges_on_the_way(word, ranks)}
    keep = {a + b for a, b in used} | set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model["merges"] = [list(pair) for pair in merges if pair in used]
    # added tokens stand in the vocabulary too: the library would give them other ids in one with holes
    model["vocab"] = {text: i for text, i in model["vocab"].items() if text in keep} | {
        token["content"]: token["id"] for token in data["added_tokens"]
    }
    return data


def main() -> None:
    """Write the file, and check it against the whole tokenizer."""
    path = Path(sys.argv[1])
    text = json.dumps(reduced(path, list(golden_texts())), ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    full, small = tokenizers.Tokenizer.from_file(str(path)), tokenizers.Tokenizer.from_str(text)
    for sample in golden_texts():
        if full.encode(sample).ids != small.encode(sample).ids:
            raise SystemExit(f"the small tokenizer encodes {sample!r} differently")
    with open(HERE / "small_qwen3.json.gz", "wb") as out, gzip.GzipFile("", "wb", 9, out, mtime=0) as packed:
        packed.write(text.encode("utf-8"))
    print(f"{small.get_vocab_size()} tokens, {(HERE / 'small_qwen3.json.gz').stat().st_size} bytes")


if __name__ == "__main__":
    main()
