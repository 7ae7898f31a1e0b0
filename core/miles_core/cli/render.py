"""`miles-plugins render`: messages to text and ids, and checkpoints joined with appended messages."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click
import orjson

from miles_core.cli.output import claim_stdout
from miles_core.errors import ConfigError, MilesError, RequestError

if TYPE_CHECKING:
    from miles_core.plugins import Plugin
    from miles_core.tito import BoundFamily


_LONG_INTEGER = re.compile(rb"\d{19}")
"""Beyond 64 bits orjson makes floats of integers; the standard library keeps them, and takes more that is not JSON."""


@click.command("render", help="Render messages with a model family's template: JSON lines in, JSON lines out.")
@click.option("--tito-model", required=True, metavar="FAMILY[@REVISION]", help="The model family, or auto.")
@click.option("--checkpoint", "--hf-checkpoint", required=True, metavar="DIR|ID", help="The tokenizer.")
@click.option("--chat-template-path", default=None, metavar="FILE", help="A chat template; only for family default.")
@click.argument("file", type=click.File("rb"), default="-")
def command(tito_model: str, checkpoint: str, chat_template_path: str | None, file: Any) -> None:
    """Read lines from FILE (stdin by default); a line that fails gives an error line and the rest goes on.

    A line is `{"messages", "tools", "chat_template_kwargs", "add_generation_prompt"}` and gives `{"text",
    "ids"}`; with `"k"` and `"checkpoint_ids"` it gives the next turn's prompt and its parts.
    """
    from miles_core.plugins import Registry
    from miles_core.server.parts import load_family

    stdout = claim_stdout()
    family, plugin = load_family(Registry.discover(), tito_model, checkpoint, chat_template_path)
    for line in _lines(file):
        stdout.write(render_line(family, plugin, line) + "\n")
    stdout.flush()


def _lines(file: Any) -> Iterator[bytes]:
    source = file if file is not sys.stdin else sys.stdin.buffer
    return iter(source)


def render_line(family: BoundFamily, plugin: Plugin, line: bytes) -> str:
    """The answer to one line, as JSON: text and ids, a join, or an error with its type and message."""
    try:
        row = _read(line)
        with plugin.guard("tito_family"):  # code of a family may raise anything, and return what is no JSON
            answer = _join(family, row) if "k" in row or "checkpoint_ids" in row else _render(family, row)
            return orjson.dumps(answer).decode("utf-8")
    except MilesError as error:
        message = error.message.encode("utf-8", "backslashreplace").decode("utf-8")
        return orjson.dumps({"error": {"type": type(error).__name__, "message": message}}).decode("utf-8")


def _shown(value: Any) -> str:
    from miles_core.tito.render import shown

    return shown(value)


def _read(line: bytes) -> dict[str, Any]:
    try:
        row = orjson.loads(line)
        if _LONG_INTEGER.search(line):
            row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the line is not valid JSON in valid Unicode: {error}") from error
    if not isinstance(row, dict):
        raise RequestError(f"the line is a JSON {type(row).__name__}, expected an object with messages")
    if not isinstance(row.get("messages"), list):
        raise RequestError("the line has no list of messages")
    kwargs = row.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise RequestError(f"chat_template_kwargs must be an object (found {_shown(kwargs)})")
    return row


def _render(family: BoundFamily, row: dict[str, Any]) -> dict[str, Any]:
    kwargs = family.merge_kwargs(row.get("chat_template_kwargs"))
    prompt = row.get("add_generation_prompt", True)
    text = family.render(row["messages"], row.get("tools"), kwargs, bool(prompt))
    return {"text": text, "ids": family.encode(text)}


def _join(family: BoundFamily, row: dict[str, Any]) -> dict[str, Any]:
    from miles_core.tito import normalise_messages

    messages, k, ids = row["messages"], row.get("k"), row.get("checkpoint_ids")
    if isinstance(k, bool) or not isinstance(k, int) or not 0 < k <= len(messages):
        raise RequestError(f"k={_shown(k)}: expected how many of the {len(messages)} messages are stored")
    size = family.tokenizer.vocab_size
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < size for i in ids):
        raise RequestError(f"checkpoint_ids must be a list of token ids below {size}")
    kwargs = family.merge_kwargs(row.get("chat_template_kwargs"))
    appended = normalise_messages(messages[k:], family.family.content_format, first=k)
    family.require_appendable(appended)
    suffix_text = family.render_suffix(messages[k - 1], appended, row.get("tools"), kwargs)
    suffix = family.encode(suffix_text)
    kept, bridge = family.join(ids, suffix)
    if not 0 <= kept <= len(ids):
        raise ConfigError(f"family {family.name} kept {kept} of {len(ids)} checkpoint ids")
    return {
        "ids": [*ids[:kept], *bridge, *suffix],
        "kept": kept,
        "bridge_ids": bridge,
        "suffix_text": suffix_text,
        "suffix_ids": suffix,
    }
