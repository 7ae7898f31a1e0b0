"""Read prompts from JSON lines or a table; every error names the file, the line and what is accepted."""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from miles_core.errors import ConfigError
from miles_core.rollout.tables import is_table, read_rows
from miles_core.types import Message

log = logging.getLogger(__name__)

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "latest_reminder")
"""What a message may be; which of them a family can write is its own affair."""

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


@dataclass(frozen=True)
class Keys:
    """Which keys or columns hold the prompt, the label and the metadata, where they have other names than ours."""

    prompt: str | None = None
    label: str | None = None
    metadata: str | None = None

    def rename(self, row: dict[str, Any], where: str) -> dict[str, Any]:
        """The row under our names. Raises ConfigError if a named key is missing."""
        given = {"prompt": self.prompt, "label": self.label, "metadata": self.metadata}
        chosen = {ours: theirs for ours, theirs in given.items() if theirs is not None}
        for ours, theirs in chosen.items():
            if theirs not in row and ours != "label":
                flag = "--input-key" if ours == "prompt" else "--metadata-key"
                raise ConfigError(f"{where}: has no {theirs!r} ({flag}); it has {', '.join(row) or 'nothing'}")
        if not chosen:
            return row
        taken = set(chosen.values()) | set(chosen) | ({"messages"} if "prompt" in chosen else set())
        return {key: value for key, value in row.items() if key not in taken} | {
            ours: row.get(theirs) for ours, theirs in chosen.items()
        }


def read_prompts(path: Path, keys: Keys | None = None) -> list[Prompt]:
    """Every prompt of a JSONL file, a Parquet file or a dataset saved to disk, in its order."""
    prompts: list[Prompt] = []
    ignored: set[str] = set()
    for where, row in read_rows(path) if is_table(path) else _json_lines(path):
        row = (keys or Keys()).rename(row, where)
        _check_keys(row, where, ignored, loose=is_table(path) or keys is not None)
        prompts.append(_prompt(len(prompts), row, where))
    if not prompts:
        raise ConfigError(f"--prompts {path}: no prompts in it; {ACCEPTED}")
    if ignored:
        log.warning("%s: keys that mean nothing here are ignored: %s", path, ", ".join(sorted(ignored)))
    return prompts


def prompts_of(rows: Iterable[dict[str, Any]]) -> list[Prompt]:
    """Prompts from objects in memory, as a line of the prompts file has them."""
    return [_prompt(index, dict(row), f"prompt {index}") for index, row in enumerate(rows)]


def _json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--prompts {path}: {error.strerror or error}") from error
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line.strip():
            yield f"{path}:{number}", _row(line, f"{path}:{number}")


def digest(prompts: Sequence[Prompt]) -> str:
    """The SHA-256 of all prompts, labels and metadata: two files that say the same have the same one."""
    whole = hashlib.sha256()
    for prompt in prompts:
        whole.update(_canonical([prompt.messages, prompt.label, prompt.metadata]) + b"\n")
    return whole.hexdigest()


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error}; {ACCEPTED}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: a {_kind(row)}, not an object; {ACCEPTED}")
    return row


def _check_keys(row: dict[str, Any], where: str, ignored: set[str], *, loose: bool) -> None:
    """Refuse what looks like a misspelled key of ours, unless `loose`, and note others."""
    for key in row.keys() - set(KEYS):
        if not loose and (close := difflib.get_close_matches(key, KEYS, n=1, cutoff=0.75)):
            raise ConfigError(f"{where}: unknown key {key!r}, did you mean {close[0]!r}? {ACCEPTED}")
        ignored.add(key)


def _prompt(index: int, row: dict[str, Any], where: str) -> Prompt:
    messages = _messages(row, where)
    metadata = _object(row.get("metadata"))
    if metadata is not None and not isinstance(metadata, dict):
        raise ConfigError(f'{where}: "metadata" is a {_kind(metadata)}, not an object; {ACCEPTED}')
    key = hashlib.sha256(_canonical(messages)).hexdigest()[:16]
    return Prompt(index, messages, row.get("label"), metadata or {}, key)


def _object(value: Any) -> Any:
    """Metadata that a table holds as JSON text is the object it spells."""
    if isinstance(value, str):
        try:
            return orjson.loads(value)
        except orjson.JSONDecodeError:
            return value
    return value


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
        if message["role"] not in ROLES:
            close = difflib.get_close_matches(message["role"], ROLES, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the roles are {', '.join(ROLES)}"
            raise ConfigError(f'{where}: "{given[0]}[{at}]" has the unknown role {message["role"]!r}; {hint}')
    return value


def _kind(value: object) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
