"""How commands write: one result, as an aligned table for people or as JSON for machines."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

SCHEMA = 1
"""The `schema` of every JSON answer; it rises when a key changes its meaning or goes."""


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], least: Sequence[int] = ()) -> str:
    """Left-aligned columns, two spaces apart; `least` are minimal widths of the first columns."""
    lines = [tuple(headers), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    widths = [max(pair) for pair in zip(widths, [*least, *[0] * len(widths)], strict=False)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def wrapped(text: str, stream: TextIO) -> str:
    """The text with lines that fit a terminal; as it is in a pipe or a file, where a line is one statement.

    What a line goes on with is indented like it, and two more.
    """
    if not stream.isatty():
        return text
    import shutil
    import textwrap

    width = shutil.get_terminal_size().columns
    return "\n".join(
        textwrap.fill(
            line,
            max(width, 40),
            subsequent_indent=" " * (len(line) - len(line.lstrip()) + 2),
            break_long_words=False,
            break_on_hyphens=False,
        )
        if len(line) > width
        else line
        for line in text.split("\n")
    )


def write(text: str, stream: TextIO | None = None) -> None:
    """Write text and a newline, at once: a reader that has gone is noticed here and not at exit."""
    stream = stream or sys.stdout
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    stream.flush()


def write_json(result: Mapping[str, Any], stream: TextIO | None = None) -> None:
    """Write `result` as indented JSON, with the schema number first."""
    import json  # here, since a table does without

    write(json.dumps({"schema": SCHEMA, **result}, indent=2), stream)


def claim_stdout() -> TextIO:
    """The real stdout, for the answer alone; whatever plugins print from now on goes to stderr.

    Called before a command imports plugins. It is not undone: a plugin may print when the program exits.
    """
    sys.stdout.flush()
    try:
        kept = os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    except (OSError, ValueError):  # no file behind it, as in tests that run a command in process
        stream = sys.stdout
    else:
        stream = open(kept, "w", encoding=sys.stdout.encoding)  # noqa: SIM115 (open until the process ends)
    sys.stdout = sys.stderr
    return stream
