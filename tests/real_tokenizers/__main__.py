"""Make what is missing and print where it lies: `PYTHONPATH=tests python -m real_tokenizers`."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from real_tokenizers.build import build
from real_tokenizers.cache import checkpoint, folder, forget_others
from real_tokenizers.sources import NAMES


def main(arguments: list[str]) -> int:
    """All of them, two at a time; `--build NAME DIRECTORY` is how the cache has one made."""
    if arguments[:1] == ["--build"]:
        build(arguments[1], Path(arguments[2]))
        return 0
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(checkpoint, NAMES))
    forget_others()
    print(f"{len(NAMES)} tokenizers in {folder()} ({time.monotonic() - began:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
