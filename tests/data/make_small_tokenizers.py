"""Make `tokenizers/NAME.json.gz`: the families' tokenizers cut down to what the golden vectors need.

Ids are the checkpoints' own. Every byte token, every added token and every merge that encoding one of the texts goes
through is kept, so that those texts encode exactly as with the whole tokenizer, and any other text still encodes.

Usage: PYTHONPATH=tests python -m data.make_small_tokenizers DIRECTORY_OF_WHOLE_TOKENIZERS [NAME…]

The directory has a folder a tokenizer with its `tokenizer.json`. Without names, every tokenizer that a file in
`golden/` needs is made anew.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import tokenizers

from data.make_small_qwen3 import reduced
from helpers.golden import DATA, golden_names, golden_rows, texts_of, tokenizer_name

EXTRA = "The quick brown fox jumps over the lazy dog. 0123456789"


def texts_for(tokenizer: str) -> list[str]:
    """What the golden vectors of one tokenizer's families encode."""
    names = [name for name in golden_names() if tokenizer_name(name) == tokenizer]
    return [EXTRA, *sorted({text for name in names for row in golden_rows(name) for text in texts_of(row)})]


def make(path: Path, tokenizer: str) -> str:
    """Write the small form of one tokenizer, checked against the whole one; a line about it."""
    texts = texts_for(tokenizer)
    text = json.dumps(reduced(path, texts), ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    full, small = tokenizers.Tokenizer.from_file(str(path)), tokenizers.Tokenizer.from_str(text)
    for sample in texts:
        if full.encode(sample).ids != small.encode(sample).ids:
            raise SystemExit(f"the small {tokenizer} tokenizer encodes {sample!r} differently")
    target = DATA / "tokenizers" / f"{tokenizer}.json.gz"
    target.parent.mkdir(exist_ok=True)
    with open(target, "wb") as out, gzip.GzipFile("", "wb", 9, out, mtime=0) as packed:
        packed.write(text.encode("utf-8"))
    return f"{tokenizer}: {len(texts)} texts, {small.get_vocab_size()} tokens, {target.stat().st_size} bytes"


def main() -> None:
    """Make the tokenizers that are named, or all."""
    directory, *names = sys.argv[1:]
    for tokenizer in names or sorted({tokenizer_name(name) for name in golden_names()}):
        print(make(Path(directory) / tokenizer / "tokenizer.json", tokenizer))


if __name__ == "__main__":
    main()
