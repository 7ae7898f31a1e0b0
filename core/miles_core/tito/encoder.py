"""A faster stand-in for a checkpoint's tokenizer: tiktoken's byte-pair encoder, used where it is proved equal.

Hugging Face's encoder takes ten times as long, and holds a hundred megabytes. Both work on the same vocabulary: a
token's id is its rank. `FastEncoder.of` builds the stand-in for a byte-level BPE tokenizer, compares both on a corpus
of every kind of text, and gives it out only if not one id differs.
"""

from __future__ import annotations

import json
import re
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import tokenizers

from miles_core.tito.literals import Literals
from miles_core.tito.probe_corpus import probe_texts

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""How text is cut by a ByteLevel pre-tokenizer that brings no pattern of its own."""


def _alphabet() -> dict[int, str]:
    """The letters that byte-level vocabularies write bytes as (Radford et al. 2019, GPT-2's encoder)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {**{byte: chr(byte) for byte in plain}, **{byte: chr(256 + n) for n, byte in enumerate(others)}}


_NEVER_TEXT = (0xFF, 0xFE, 0xFD, 0xFC, 0xFB, 0xFA, 0xF9, 0xF8, 0xF7, 0xF6, 0xF5, 0xC0, 0xC1)
"""Bytes that UTF-8 does not use."""

_NO_TEXT = {"\0<miles: not a text>\0": 2**32 - 1}
"""tiktoken gives ids as an array only where it is told of special tokens; none is ever allowed."""

WINDOW = 2**14
"""How many characters or ids are handled at once where Python keeps the interpreter to itself: other threads, which
answer other sessions, wait for less than a millisecond."""

LETTERS = _alphabet()
BYTES = {ord(letter): byte for byte, letter in LETTERS.items()}


class UnsupportedError(Exception):
    """Why a tokenizer has no faster stand-in."""


class FastEncoder:
    """Encodes and decodes like the tokenizer it was built from. Immutable and safe to share between threads.

    However long the text, encoding lets other threads run. `whole` loads the original, for the texts that only it can
    take: those with characters that this Python's Unicode does not know, where the tokenizer normalises.
    """

    def __init__(self, original: tokenizers.Tokenizer, whole: Callable[[], tokenizers.Tokenizer]) -> None:
        """Raises UnsupportedError, saying what is not supported; `of` also proves the result equal."""
        import regex  # both are needed where tokens are made, and nowhere else
        from tiktoken._tiktoken import CoreBPE

        self._whole = whole
        self._original: tokenizers.Tokenizer | None = original
        self._normalise = _normalises(original)
        decoder = original.get_added_tokens_decoder()
        self.added = {token.content: number for number, token in decoder.items()}
        self._spelling = {number: text for text, number in self.added.items()}
        self.special_ids = frozenset(number for number, token in decoder.items() if token.special)
        self.size: int = original.get_vocab_size(with_added_tokens=True)
        if any(token.lstrip or token.rstrip or token.single_word for token in decoder.values()):
            raise UnsupportedError("an added token takes white space with it")
        raw = [token.content for token in decoder.values() if not token.normalized]
        self._cuts = (Literals(raw), Literals(set(self.added) - set(raw)))
        *early, last = _patterns(original)
        self._early = [regex.compile(pattern) for pattern in early]
        ranks, pattern = _ranks(original, self.added), _total(last)
        self._core = CoreBPE(ranks, _NO_TEXT, pattern)
        self._never = {} if original.model.ignore_merges else self._unreachable(ranks)
        if self._never:
            reachable = {word: rank for word, rank in ranks.items() if word not in self._never}
            self._core = CoreBPE(reachable, _NO_TEXT, pattern)
        self._spelled = {number: word for word, number in self._never.items()}
        self._spelled.update((number, _bytes_of(text)) for text, number in self.added.items())

    @classmethod
    def of(cls, original: tokenizers.Tokenizer, whole: Callable[[], tokenizers.Tokenizer] | None = None) -> FastEncoder:
        """The stand-in for a tokenizer. Raises UnsupportedError if there is none, or if it is not equal."""
        try:
            fast = cls(original, whole or (lambda: original))
        except ImportError as error:
            raise UnsupportedError(f"tiktoken is not installed: {error}") from error
        except (ValueError, KeyError, AttributeError) as error:
            raise UnsupportedError(f"its parts are not as expected: {error}") from error
        for text in (*probe_texts(fast.added), *fast._vocabulary_probes()):
            want = original.encode(text, add_special_tokens=False).ids
            have = fast.encode(text)
            if want != have or original.decode(want, skip_special_tokens=False) != fast.decode(have):
                raise UnsupportedError(f"it differs on {text[:60]!r}")
        fast._original = None
        return fast

    def _vocabulary_probes(self) -> Iterator[str]:
        """Texts of the tokens that are said to be unreachable, and of a few thousand others."""
        numbers = [*islice(self._never.values(), 2000), *range(0, self.size, 29)]
        words = [word for number in numbers if (word := self.token_bytes(number)) is not None]
        texts = [word.decode("utf-8", "ignore") for word in words]
        yield from (" ".join(texts[at : at + 50]) for at in range(0, len(texts), 50))
        yield from ("".join(texts[at : at + 50]) for at in range(0, len(texts), 50))

    def _unreachable(self, ranks: Mapping[bytes, int]) -> dict[bytes, int]:
        """Tokens that no merges lead to. The tokenizer never makes one of text; tiktoken would, of a whole word."""
        alone = next((bytes([b]) for b in _NEVER_TEXT if not any(b in word for word in ranks if len(word) > 1)), None)
        if alone is None:
            raise UnsupportedError("every byte is part of a longer token")
        whole = self._core.encode_single_piece
        # Behind a byte that merges with nothing, a word is not looked up whole, but merged.
        return {word: rank for word, rank in ranks.items() if len(word) > 1 and whole(word + alone)[0] != rank}

    def encode(self, text: str) -> list[int]:
        """Ids of `text`. Raises UnicodeEncodeError on lone surrogates."""
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> array[int]:
        """Ids of `text` as int32. Raises UnicodeEncodeError on lone surrogates."""
        if not text.isascii():
            for at in range(0, len(text), WINDOW):
                text[at : at + WINDOW].encode("utf-8")
            if self._normalise and _unknown(text):
                if self._original is None:
                    self._original = self._whole()
                return array("i", self._original.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        ids = array("i")
        for part in self._parts(text, 0):
            if isinstance(part, int):
                ids.append(part)
            else:
                self._words(part, 0, ids)
        return ids

    def cut(self, text: str, at: frozenset[int]) -> list[tuple[int | None, str]] | None:
        """The text cut at the added tokens `at`: each with the text behind it, the first text with None.

        The parts are tokenized apart from each other, wherever the text is. None for text that only the original takes.
        """
        if not text.isascii() and self._normalise and _unknown(text):
            return None
        found: list[tuple[int | None, str]] = []
        token: int | None = None
        behind: list[str] = []
        for part in self._parts(text, 0):
            if isinstance(part, str):
                behind.append(part)
            elif part in at:
                found.append((token, "".join(behind)))
                token, behind = part, []
            else:
                behind.append(self._spelling[part])
        found.append((token, "".join(behind)))
        return found

    def _parts(self, text: str, stage: int) -> Iterator[int | str]:
        """Added tokens and the text between them: first those that ignore normalisation, then the others."""
        if stage == len(self._cuts):
            yield text
            return
        at = 0
        for token in self._cuts[stage].find(text):
            if token.start() > at:
                yield from self._between(text[at : token.start()], stage)
            yield self.added[token[0]]
            at = token.end()
        if at < len(text):
            yield from self._between(text[at:], stage)

    def _between(self, text: str, stage: int) -> Iterator[int | str]:
        if stage == 0 and self._normalise and not text.isascii():
            text = composed(text)
        return self._parts(text, stage + 1)

    def _words(self, text: str, step: int, ids: array[int]) -> None:
        """Append the ids of text without added tokens; all steps of cutting but the last are taken here."""
        if step == len(self._early):
            ids.frombytes(bytes(self._core.encode_to_tiktoken_buffer(text, set())))
            return
        at = 0
        for cut in self._early[step].finditer(text, concurrent=len(text) > WINDOW):
            if cut.start() > at:
                self._words(text[at : cut.start()], step + 1, ids)
            self._words(cut[0], step + 1, ids)
            at = cut.end()
        if at < len(text):
            self._words(text[at:], step + 1, ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; unknown ids are skipped."""
        ids = list(ids)
        if len(ids) < WINDOW and self._spelled.keys().isdisjoint(ids):
            return self._run_bytes(ids).decode("utf-8", "replace")
        out: list[bytes] = []
        run: list[int] = []
        for number in ids:
            known = self._spelled.get(number)
            if known is None:
                run.append(number)
                if len(run) < WINDOW:
                    continue
            if run:
                out.append(self._run_bytes(run))
                run = []
            if known is not None:
                out.append(known)
        if run:
            out.append(self._run_bytes(run))
        return b"".join(out).decode("utf-8", "replace")

    def _run_bytes(self, ids: list[int]) -> bytes:
        try:
            found: bytes = self._core.decode_bytes(ids)
        except (KeyError, OverflowError):
            return b"".join(filter(None, map(self.token_bytes, ids)))
        return found

    def token_bytes(self, number: int) -> bytes | None:
        """The bytes of one token, or None if there is no such id."""
        if number in self._spelled:
            return self._spelled[number]
        try:
            found: bytes = self._core.decode_single_token_bytes(number)
        except (KeyError, OverflowError):
            return None
        return found

    def token_to_id(self, text: str) -> int | None:
        """The id of the token spelled `text` in the vocabulary, or None."""
        if text in self.added:
            return self.added[text]
        try:
            word = bytes(BYTES[ord(letter)] for letter in text)
            found: int = self._never[word] if word in self._never else self._core.encode_single_token(word)
        except KeyError:
            return None
        return found

    def id_to_token(self, number: int) -> str | None:
        """The token's spelling in the vocabulary."""
        if number in self._spelling:
            return self._spelling[number]
        found = self.token_bytes(number)
        return None if found is None else "".join(LETTERS[byte] for byte in found)


_CUT_BEFORE = re.compile("[\x00-\x7f\u3041-\u3096\u30a1-\u30fa\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3]")
"""Characters that no normal form joins with what is before them: ASCII, kana, Han, Hangul syllables."""


def _unknown(text: str) -> bool:
    """Whether a character is not assigned in this Python's Unicode, so that its normal form is not known."""
    for at in range(0, len(text), WINDOW):
        part = text[at : at + WINDOW]
        if not part.isascii() and any(unicodedata.category(letter) == "Cn" for letter in set(part)):
            return True
    return False


def composed(text: str, *, window: int = WINDOW) -> str:
    """The text in NFC. Long text is taken in parts that do not touch each other's form."""
    parts = []
    at = 0
    while at < len(text):
        cut = _CUT_BEFORE.search(text, at + window)
        end = cut.start() if cut else len(text)
        parts.append(unicodedata.normalize("NFC", text[at:end]))
        at = end
    return "".join(parts)


def _bytes_of(added: str) -> bytes:
    """An added token's bytes as the byte-level decoder reads them: through its alphabet where that has every letter."""
    mapped = [BYTES.get(ord(letter)) for letter in added]
    return added.encode("utf-8") if None in mapped else bytes(byte for byte in mapped if byte is not None)


def _state(part: Any) -> Mapping[str, Any]:
    """What a part of a tokenizer is, as its file says it; nothing if it has no such part."""
    found: Mapping[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return found


def _normalises(original: tokenizers.Tokenizer) -> bool:
    """Whether text is normalised to NFC. Raises UnsupportedError for other normalisers."""
    state = _state(original.normalizer)
    inner = state.get("normalizers", [state] if state else [])
    kinds = {part.get("type") for part in inner}
    if not kinds <= {"NFC"}:
        raise UnsupportedError(f"the normalizer is {', '.join(map(str, sorted(kinds)))}")
    return bool(kinds)


def _patterns(original: tokenizers.Tokenizer) -> list[str]:
    """The patterns that cut text into words, one after the other. Raises UnsupportedError for other ways of cutting."""
    state = _state(original.pre_tokenizer)
    *cuts, last = state.get("pretokenizers", [state])
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        raise UnsupportedError("the vocabulary is not byte-level")
    if _state(original.decoder).get("type") != "ByteLevel":
        raise UnsupportedError("the decoder is not byte-level")
    for cut in cuts:
        if cut.get("type") != "Split" or cut.get("behavior") != "Isolated" or cut.get("invert"):
            raise UnsupportedError("text is not cut by patterns")
    patterns = [pattern for cut in cuts if (pattern := cut["pattern"].get("Regex")) is not None]
    if len(patterns) != len(cuts) or bool(patterns) is bool(last.get("use_regex")):
        raise UnsupportedError("text is not cut by patterns")
    return patterns or [GPT2]


def _total(pattern: str) -> str:
    """The pattern, and what it leaves over as words of their own, as the tokenizer has it; tiktoken would lose it."""
    return f"{pattern}|(?s:(?:(?!{pattern}).)+)"


def _ranks(original: tokenizers.Tokenizer, added: Mapping[str, int]) -> dict[bytes, int]:
    """Bytes of every ordinary token with its id, which is its rank among the merges."""
    model = original.model
    if not isinstance(model, tokenizers.models.BPE) or model.dropout or model.byte_fallback:
        raise UnsupportedError("the model is not plain BPE")
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        raise UnsupportedError("words are marked")
    ranks = {}
    for text, number in original.get_vocab(with_added_tokens=False).items():
        if text not in added:
            try:
                ranks[text.translate(BYTES).encode("latin-1")] = number
            except UnicodeEncodeError as error:
                raise UnsupportedError(f"the token {text!r} is not written in the byte alphabet") from error
    return ranks
