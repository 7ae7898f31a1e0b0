"""A faster stand-in for a checkpoint's tokenizer: tiktoken's byte-pair encoder, used where it is proved equal.

Hugging Face's encoder takes ten times as long, and holds a hundred megabytes. Both work on the same vocabulary: a
token's id is its rank. `FastEncoder.of` builds the stand-in for a byte-level BPE tokenizer, compares both on a corpus
of every kind of text, and gives it out only if not one id differs.
"""

from __future__ import annotations

import marshal
import re
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import islice

import tokenizers

from miles_core.tito.id_places import IdPlaces
from miles_core.tito.literals import Literals, are_apart
from miles_core.tito.probe_corpus import probe_texts
from miles_core.tito.tokenizer_file import BYTES, LETTERS, TokenizerFile, UnsupportedError

_NEVER_TEXT = (0xFF, 0xFE, 0xFD, 0xFC, 0xFB, 0xFA, 0xF9, 0xF8, 0xF7, 0xF6, 0xF5, 0xC0, 0xC1)
"""Bytes that UTF-8 does not use."""

_NO_TEXT = {"\0<miles: not a text>\0": 2**32 - 1}
"""tiktoken gives ids as an array only where it is told of special tokens; none is ever allowed."""

WINDOW = 2**14
"""How many characters or ids are handled at once where Python keeps the interpreter to itself: other threads, which
answer other sessions, wait for less than a millisecond."""


class FastEncoder:
    """Encodes and decodes like the tokenizer it was built from. Immutable and safe to share between threads.

    However long the text, encoding lets other threads run. `whole` loads the original, for the texts that only it can
    take: those with characters that this Python's Unicode does not know, where the tokenizer normalises.
    """

    def __init__(self, file: TokenizerFile, whole: Callable[[], tokenizers.Tokenizer]) -> None:
        """Raises UnsupportedError, saying what is not supported; `of` also proves the result equal."""
        import regex  # both are needed where tokens are made, and nowhere else
        from tiktoken._tiktoken import CoreBPE

        self._whole = whole
        self._original: tokenizers.Tokenizer | None = None
        self._normalise = file.normalises()
        decoder = file.added_tokens
        self.added = file.added
        self._spelling = {number: text for text, number in self.added.items()}
        self.special_ids = frozenset(number for number, token in decoder.items() if token.special)
        self.size: int = file.size
        if any(token.lstrip or token.rstrip or token.single_word for token in decoder.values()):
            raise UnsupportedError("an added token takes white space with it")
        raw = [token.content for token in decoder.values() if not token.normalized]
        late = set(self.added) - set(raw)
        self._cuts = (Literals(raw), Literals(late)) if late else (Literals(raw),)
        *early, last = file.patterns()
        self._found: dict[frozenset[int], Literals] = {}
        """What finds the tokens at which text was cut so far; a family cuts at its control tokens alone."""
        self._early = [regex.compile(pattern) for pattern in early]
        ranks, pattern = file.ranks(), _total(last)
        self._never: dict[bytes, int] = {}
        if not file.ignores_merges():
            # what no merge makes is left out at once: then there seldom is more, which takes another table
            self._never = {word: ranks.pop(word) for word in file.unmade()}
        self._core = CoreBPE(ranks, _NO_TEXT, pattern)
        if not file.ignores_merges() and (more := self._unreachable(ranks)):
            self._never.update(more)
            self._core = CoreBPE({word: rank for word, rank in ranks.items() if word not in more}, _NO_TEXT, pattern)
        self._spelled: dict[int, bytes] = {number: word for word, number in self._never.items()}
        self._spelled.update((number, _bytes_of(text)) for text, number in self.added.items())
        self._spelled_places = IdPlaces(self._spelled)

    @classmethod
    def of(cls, text: bytes, whole: Callable[[], tokenizers.Tokenizer]) -> FastEncoder:
        """The stand-in for the tokenizer of a `tokenizer.json`, given as the file's text.

        Raises UnsupportedError if there is none, or if it is not equal.
        """
        try:
            file = TokenizerFile(text)
            fast = cls(file, whole)
        except ImportError as error:
            raise UnsupportedError(f"tiktoken is not installed: {error}") from error
        except (ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:
            raise UnsupportedError(f"its parts are not as expected: {error}") from error
        fast._prove(file.tokenizer())
        del file
        # copies: these few lie scattered over all that was read of the file, and would keep much of it from being freed
        fast._never, fast._spelled = marshal.loads(marshal.dumps((fast._never, fast._spelled)))
        return fast

    def _prove(self, original: tokenizers.Tokenizer) -> None:
        """Raises UnsupportedError unless both treat every text of the corpus and of the vocabulary alike."""
        self._original = original
        for text in (*probe_texts(self.added), *self._vocabulary_probes()):
            want = original.encode(text, add_special_tokens=False).ids
            have = self.encode(text)
            if want != have or original.decode(want, skip_special_tokens=False) != self.decode(have):
                raise UnsupportedError(f"it differs on {text[:60]!r}")
        self._original = None

    def _vocabulary_probes(self) -> Iterator[str]:
        """Texts of the tokens that are said to be unreachable, and of a few thousand others."""
        numbers = [*islice(self._never.values(), 2000), *range(0, self.size, 29)]
        words = [word for number in numbers if (word := self.token_bytes(number)) is not None]
        texts = [word.decode("utf-8", "ignore") for word in words]
        yield from (" ".join(texts[at : at + 50]) for at in range(0, len(texts), 50))
        yield from ("".join(texts[at : at + 50]) for at in range(0, len(texts), 50))

    def _unreachable(self, ranks: Mapping[bytes, int]) -> dict[bytes, int]:
        """Tokens that no merges lead to. The tokenizer never makes one of text; tiktoken would, of a whole word."""
        longer = b"".join(word for word in ranks if len(word) > 1)
        alone = next((bytes([byte]) for byte in _NEVER_TEXT if byte not in longer), None)
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
        if (plain := self.split(text, at)) is not None:
            return plain
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

    def split(self, text: str, at: frozenset[int]) -> list[tuple[int | None, str]] | None:
        """The same, every place of the text at which one of these tokens is spelled being such a cut.

        None where that is not sure: where added tokens can begin within others, or composing characters changes a text.
        """
        if not self._apart or not (text.isascii() or not self._normalise or _is_composed(text)):
            return None
        tokens = self._found.get(at)
        if tokens is None:
            tokens = self._found[at] = Literals([self._spelling[number] for number in at])
        found: list[tuple[int | None, str]] = []
        token, start = None, 0
        for cut in tokens.find(text):
            found.append((token, text[start : cut.start()]))
            token, start = self.added[cut[0]], cut.end()
        found.append((token, text[start:]))
        return found

    @cached_property
    def _apart(self) -> bool:
        return are_apart(self.added.keys() - {""})

    def _parts(self, text: str, stage: int) -> Iterator[int | str]:
        """Added tokens and the text between them: first those that ignore normalisation, then the others."""
        at = 0
        for token in self._cuts[stage].find(text):
            if token.start() > at:
                yield from self._between(text[at : token.start()], stage)
            yield self.added[token[0]]
            at = token.end()
        if at < len(text):
            yield from self._between(text[at:], stage)

    def _between(self, text: str, stage: int) -> Iterable[int | str]:
        if stage == 0 and self._normalise and not text.isascii():
            text = composed(text)
        return self._parts(text, stage + 1) if stage + 1 < len(self._cuts) else (text,)

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
        spelled = self._spelled
        if isinstance(ids, array) and ids.typecode == "i" and len(ids) >= 64:  # for fewer, looking at each is as fast
            places, ids = self._spelled_places.find(ids), ids.tolist()
        else:
            ids = list(ids)
            places = [place for place, number in enumerate(ids) if number in spelled]
        out: list[bytes] = []
        at = 0
        for place in (*places, len(ids)):
            for start in range(at, place, WINDOW):
                out.append(self._run_bytes(ids[start : min(start + WINDOW, place)]))
            if place < len(ids):
                out.append(spelled[ids[place]])
            at = place + 1
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
            if word in self._never:
                return self._never[word]
            found: int = self._core.encode_single_token(word)
        except KeyError:
            return None
        return found

    def id_to_token(self, number: int) -> str | None:
        """The token's spelling in the vocabulary."""
        if number in self._spelling:
            return self._spelling[number]
        found = self.token_bytes(number)
        return None if found is None else "".join(LETTERS[byte] for byte in found)


def _is_composed(text: str) -> bool:
    """Whether a text stays as it is when its characters are composed; what is very long is not looked at."""
    return len(text) <= WINDOW and unicodedata.is_normalized("NFC", text)


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


def _total(pattern: str) -> str:
    """The pattern, and what it leaves over as words of their own, as the tokenizer has it; tiktoken would lose it."""
    return f"{pattern}|(?s:(?:(?!{pattern}).)+)"
