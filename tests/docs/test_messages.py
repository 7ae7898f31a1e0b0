"""The page on errors has every message that an error of ours can have, and no message that nothing writes."""

from __future__ import annotations

import re

from helpers.messages import SOURCES, letters, shown, texts
from helpers.pages import ROOT
from helpers.tables import codes, page, tables

MESSAGES = sorted({
    message.replace("\\|", "|")
    for rows in tables(page("docs/errors.md"))
    if rows[0] == ["message", "cause", "way out"]
    for row in rows[1:]
    for message in codes(row[0])
})  # fmt: skip


def pattern(message: str) -> re.Pattern[str]:
    """What has the words of a message in their order; values stand between them, and a space may begin a line."""
    return re.compile(re.sub(r"(\\ )+", r"\\s+", re.escape(message)).replace("…", ".*"), re.DOTALL)


def reason(text: str) -> str:
    """A message up to what to do about it, which the page may say in other words."""
    return re.split(r"\n|[;.?] ", text)[0]


def test_every_documented_message_is_one_that_the_code_writes() -> None:
    written = {text for path in SOURCES for text in (*texts(path), *shown(path))}
    stale = []
    for message in MESSAGES:
        assert len(message.replace("…", "").strip(" :,()")) >= 6, f"{message}: too few words to tell it from others"
        known, rarest = pattern(message), max(re.split("…| ", message), key=len)
        if not any(known.search(text) for text in written if rarest in text):
            stale.append(message)
    assert not stale, "\n".join(["nothing writes what docs/errors.md has:", *stale])


def test_every_message_of_an_error_is_documented() -> None:
    known = [(pattern(message), letters(message)) for message in MESSAGES]
    found = [(path, text) for path in SOURCES for text in sorted(shown(path))]
    assert len(found) > 400
    # half of the reason's letters: a row of hardly more than values would do for too many messages
    missing = [
        f"{path.relative_to(ROOT)}: {text}"
        for path, text in found
        if not any(2 * size >= letters(reason(text)) and known.search(text) for known, size in known)
    ]
    assert not missing, "\n".join(["docs/errors.md lacks:", *missing])
