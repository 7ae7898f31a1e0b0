"""A checkpoint's `tokenizer.json`, read once for two: a faster encoder, and the library's tokenizer to compare it with.

The library takes twice as long to read the file as to take what was read from Python's objects, which the faster
encoder is built from too. All that is short, which is all but the vocabulary and its merges, it reads itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import orjson
import tokenizers

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""How text is cut by a ByteLevel pre-tokenizer that brings no pattern of its own."""


def _alphabet() -> dict[int, str]:
    """The letters that byte-level vocabularies write bytes as (Radford et al. 2019, GPT-2's encoder)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {**{byte: chr(byte) for byte in plain}, **{byte: chr(256 + n) for n, byte in enumerate(others)}}


LETTERS = _alphabet()
BYTES = {ord(letter): byte for byte, letter in LETTERS.items()}


def bytes_of(token: str) -> bytes:
    """The bytes that an ordinary token stands for. Raises UnicodeEncodeError if it is not written in the alphabet."""
    return token.translate(BYTES).encode("latin-1")


class UnsupportedError(Exception):
    """Why a tokenizer has no faster stand-in."""


_OPTIONS = {
    "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback",
    "ignore_merges",
}  # fmt: skip
"""What else is said of a BPE model, by the library's names of its arguments."""


class TokenizerFile:
    """The parts of a byte-level BPE tokenizer, by its file."""

    def __init__(self, text: bytes) -> None:
        """Raises UnsupportedError, or what Python raises for a file of another shape."""
        data = orjson.loads(text)
        self.added_tokens = {token.pop("id"): tokenizers.AddedToken(**token) for token in data["added_tokens"]}
        """The added tokens by their ids."""
        self.added: dict[str, int] = {token.content: number for number, token in self.added_tokens.items()}
        """Their ids by their texts."""
        model = data["model"]
        self._vocabulary: dict[str, int] = model.pop("vocab")
        self._merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model.pop("merges")]
        self._rules = _without_vocabulary(data)
        self._options = {name: value for name, value in model.items() if name != "type" and value is not None}
        self.size = len(self._vocabulary.keys() | self.added.keys())

    def tokenizer(self) -> tokenizers.Tokenizer:
        """The library's tokenizer, as it is when it reads the file itself.

        Raises UnsupportedError if that is not sure, or if the library refuses a part.
        """
        if not self._options.keys() <= _OPTIONS:
            raise UnsupportedError(f"its model has {', '.join(sorted(self._options.keys() - _OPTIONS))}")
        made = self._rules
        try:
            made.model = tokenizers.models.BPE(self._vocabulary, self._merges, **self._options)
            made.add_tokens([*self.added_tokens.values()])
        except Exception as error:  # the library has no class of its own for it
            raise UnsupportedError(f"its parts are not as expected: {error}") from error
        # it gives the ids of added tokens itself, whatever the file says
        if _facts(made.get_added_tokens_decoder()) != _facts(self.added_tokens):
            raise UnsupportedError("its added tokens have other ids or properties than the file says")
        if made.get_vocab_size(with_added_tokens=True) != self.size:
            raise UnsupportedError(f"it has {made.get_vocab_size()} tokens, and the file {self.size}")
        return made

    def normalises(self) -> bool:
        """Whether text is normalised to NFC. Raises UnsupportedError for other normalisers."""
        state = _state(self._rules.normalizer)
        inner = state.get("normalizers", [state] if state else [])
        kinds = {part.get("type") for part in inner}
        if not kinds <= {"NFC"}:
            raise UnsupportedError(f"the normalizer is {', '.join(map(str, sorted(kinds)))}")
        return bool(kinds)

    def ignores_merges(self) -> bool:
        """Whether a word that is a token becomes that token, whatever its merges lead to."""
        return bool(self._rules.model.ignore_merges)

    def patterns(self) -> list[str]:
        """The patterns that cut text into words, one after the other. Raises UnsupportedError for other ways."""
        state = _state(self._rules.pre_tokenizer)
        *cuts, last = state.get("pretokenizers", [state])
        if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
            raise UnsupportedError("the vocabulary is not byte-level")
        if _state(self._rules.decoder).get("type") != "ByteLevel":
            raise UnsupportedError("the decoder is not byte-level")
        for cut in cuts:
            if cut.get("type") != "Split" or cut.get("behavior") != "Isolated" or cut.get("invert"):
                raise UnsupportedError("text is not cut by patterns")
        patterns = [pattern for cut in cuts if (pattern := cut["pattern"].get("Regex")) is not None]
        if len(patterns) != len(cuts) or bool(patterns) is bool(last.get("use_regex")):
            raise UnsupportedError("text is not cut by patterns")
        return patterns or [GPT2]

    def ranks(self) -> dict[bytes, int]:
        """Bytes of every ordinary token with its id, which is its rank among the merges."""
        model = self._rules.model
        if not isinstance(model, tokenizers.models.BPE) or model.dropout or model.byte_fallback:
            raise UnsupportedError("the model is not plain BPE")
        if model.continuing_subword_prefix or model.end_of_word_suffix:
            raise UnsupportedError("words are marked")
        if len(set(self._vocabulary.values())) < len(self._vocabulary):
            raise UnsupportedError("two tokens have one id")
        ranks = {}
        for text, number in self._vocabulary.items():
            if text not in self.added:
                try:
                    ranks[bytes_of(text)] = number
                except UnicodeEncodeError as error:
                    raise UnsupportedError(f"the token {text!r} is not written in the byte alphabet") from error
        return ranks

    def unmade(self) -> set[bytes]:
        """Ordinary tokens longer than a byte that no merge makes."""
        made = set(map("".join, self._merges))
        return {bytes_of(token) for token in self._vocabulary.keys() - made - self.added.keys() if len(token) > 1}


def _without_vocabulary(data: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The file's rules as the library reads them, which is done at once where there are no tokens."""
    rules = {**data, "added_tokens": [], "model": {**data["model"], "vocab": {}, "merges": []}}
    try:
        return tokenizers.Tokenizer.from_str(orjson.dumps(rules).decode())
    except Exception as error:  # the library has no class of its own for it
        raise UnsupportedError(f"its parts are not as expected: {error}") from error


def _facts(tokens: Mapping[int, tokenizers.AddedToken]) -> dict[int, Any]:
    """All that is said of added tokens, to be compared."""
    return {number: token.__getstate__() for number, token in tokens.items()}


def _state(part: Any) -> Mapping[str, Any]:
    """What a part of a tokenizer is, as its file says it; nothing if it has no such part."""
    found: Mapping[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return found
