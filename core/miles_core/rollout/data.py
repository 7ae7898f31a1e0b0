"""Read prompts from a JSONL file; every error names the file, the line and what is accepted."""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from miles_core.errors import ConfigError
from miles_core.types import Message

log = logging.getLogger(__name__)

KEYS = ("messages", "prompt", "label", "metadata")
ACCEPTED = (
    'a line is an object with "messages" (a list of chat messages) or "prompt" (text, or such a list), '
    'and optionally "label" and "metadata" (an object)'
)


@dataclass(frozen=True)
class Prompt:
    """One line of the prompts file; `index` counts prompts from 0, blank lines left out."""

    index: int
    messages: list[Message]
    label: Any
    metadata: dict[str, Any]
    hash: str
    """The first 16 hex digits of the SHA-256 of the messages as canonical JSON."""


def read_prompts(path: Path) -> list[Prompt]:
    """Every prompt of the file, in its order."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--prompts {path}: {error.strerror or error}") from error
    prompts: list[Prompt] = []
    ignored: set[str] = set()
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line.strip():
            row = _row(line, f"{path}:{number}", ignored)
            prompts.append(_prompt(len(prompts), row, f"{path}:{number}"))
    if not prompts:
        raise ConfigError(f"--prompts {path}: no prompts in it; {ACCEPTED}")
    if ignored:
        log.warning("%s: keys that mean nothing here are ignored: %s", path, ", ".join(sorted(ignored)))
    return prompts


def digest(prompts: Sequence[Prompt]) -> str:
    """The SHA-256 of all prompts, labels and metadata: two files that say the same have the same one."""
    whole = hashlib.sha256()
    for prompt in prompts:
        whole.update(_canonical([prompt.messages, prompt.label, prompt.metadata]) + b"\n")
    return whole.hexdigest()


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _row(line: bytes, where: str, ignored: set[str]) -> dict[str, Any]:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error}; {ACCEPTED}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: a {_kind(row)}, not an object; {ACCEPTED}")
    for key in row.keys() - set(KEYS):
        if close := difflib.get_close_matches(key, KEYS, n=1, cutoff=0.75):
            raise ConfigError(f"{where}: unknown key {key!r}, did you mean {close[0]!r}? {ACCEPTED}")
        ignored.add(key)
    return row


def _prompt(index: int, row: dict[str, Any], where: str) -> Prompt:
    messages = _messages(row, where)
    metadata = row.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise ConfigError(f'{where}: "metadata" is a {_kind(metadata)}, not an object; {ACCEPTED}')
    key = hashlib.sha256(_canonical(messages)).hexdigest()[:16]
    return Prompt(index, messages, row.get("label"), metadata or {}, key)


def _messages(row: dict[str, Any], where: str) -> list[Message]:
    given = [key for key in ("messages", "prompt") if row.get(key) is not None]
    if len(given) != 1:
        what = 'both "messages" and "prompt"' if given else 'neither "messages" nor "prompt"'
        raise ConfigError(f"{where}: {what}; {ACCEPTED}")
    value = row[given[0]]
    if given == ["prompt"] and isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        what = "an empty list" if isinstance(value, list) else f"a {_kind(value)}"
        raise ConfigError(f'{where}: "{given[0]}" is {what}; {ACCEPTED}')
    for at, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConfigError(f'{where}: "{given[0]}[{at}]" is not an object with a "role"; {ACCEPTED}')
    return value


def _kind(value: object) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
