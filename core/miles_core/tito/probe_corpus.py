# ruff: noqa: E501  (samples of text are not wrapped)
"""Texts on which two tokenizers that claim to be equal are compared: every kind of character, and every added token."""

from __future__ import annotations

import random
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from functools import cache

_WRITTEN = (
    "",
    "Hello, world! It's what they've said: we'll see, I'm sure he'd go. DON'T 'RE 'LL 'Ve 'S x's",
    "it’s ‘quoted’ “text” — dashes – and… dots ''' ſt 'sſ 'ſ 'K",
    "def f(x: int = 0) -> list[str]:\n    return [f'{x:>4}' for _ in range(10)]\n\n\n\nclass A(B):\n\tpass\r\n\r\n  end",
    '{"name": "get_weather", "arguments": {"city": "São Paulo", "n": [1, -2.5e-7, null, true]}}',
    "<html>\n<body class='x'>&nbsp;</body></html> <tool> </tool> <|not_a_token|> <| im_start |>",
    "https://example.org/a/b?c=d&e=%20#f user@example.com C:\\path\\to\\file.txt ~/.cache ./a ../b /usr/bin/env\n/\n//x",
    "0 1 12 123 1234 12345 1234567890 3.14159 1,000,000 1e-07 0x1F ٣٤٥ १२ ① ½ Ⅷ a1b2c3 1st 2nd",
    " leading", "trailing ", "  two  spaces  ", "\n\n", " \n \n", "\t\ttabs\t", "a\u00a0b\u2003c\u3000d\u2028e\u2029f\u0085g",
    "x" * 40, " " * 33, "\n" * 17, "ab " * 20, "=" * 64 + "-" * 64 + "#" * 7, "!?!?!...;;;:::", "$$$ €£¥ 100%",
    "e\u0301 é A\u030a Å Å ẛ\u0323 q\u0307\u0323 ﬁ ﬃ 가 각 क़ Ω a\u0315\u0300\u05ae\u0300b",
    "😀👍🏽 👨\u200d👩\u200d👧\u200d👦 🇫🇷 ❤\ufe0f 1\ufe0f\u20e3 🌊🐋",
    "\x00\x01\x02\x1b[0m\x7f\x80\x9f \u200b\u200e\u202e\ufeff\u2060 �\ufffe \ue000\U000f0000",
    "CamelCaseWords HTTPServer parseJSONData snake_case_words SCREAMING_CASE kebab-case-words iPhone McDonald ǅ ǈx ʰa",
)  # fmt: skip

_SCRIPTS = (
    "Le cœur déçu mais l'âme plutôt naïve",
    "Съешь же ещё этих мягких",
    "Ξεσκεπάζω τὴν ψυχοφθόρα",
    "東京都で雨が降る。カタカナ・ひらがな 中文文本，没有空格",
    "한국어 문장입니다", "العربية نص\u0651\u064c", "עברית ש\u05b8\u05c1לו\u05b9ם",
    "ह\u093fन\u094dद\u0940 प\u093eठ", "ภาษาไทยไม\u0e48ม\u0e35ช\u0e48องว\u0e48าง", "tiếng Việt có dấu",
)  # fmt: skip


def probe_texts(added: Iterable[str]) -> Iterator[str]:
    """The corpus, and every added token alone, doubled, and inside a sentence. About 60 KB; the same every time."""
    yield from _WRITTEN
    yield from _SCRIPTS
    yield from _characters()
    yield from _mixtures()
    for text in sorted(added):
        yield f"{text}{text} a{text}b \n{text}\n {text[:-1]} {text[1:]}"


@cache
def _characters() -> tuple[str, ...]:
    """A few characters of every general category and script, between letters, digits, spaces and one another."""
    rng = random.Random(0)
    found: dict[str, list[str]] = {}
    for code in range(0x20, sys.maxunicode + 1, 7):
        letter = chr(code)
        kind = unicodedata.category(letter)
        if kind not in ("Cs", "Cn"):
            found.setdefault(kind + unicodedata.name(letter, " ").partition(" ")[0], []).append(letter)
    picked = [rng.choice(letters) for _, letters in sorted(found.items())]
    rng.shuffle(picked)
    lines = [picked[at : at + 40] for at in range(0, len(picked), 40)]
    return tuple(join(line) for line in lines for join in ("".join, " ".join, "a".join, "1".join))


@cache
def _mixtures() -> tuple[str, ...]:
    """Random text over small alphabets, in which borders between kinds of characters are frequent."""
    rng = random.Random(1)
    alphabets = ("aA1 .\n'", "abé\u0301 \t\n\r", "<|>_im start/", "中文a1 あ", " \n\t\u00a0x", "'sStTrReEvVmMlLdD ")
    return tuple("".join(rng.choices(letters, k=400)) for letters in alphabets for _ in range(6))
