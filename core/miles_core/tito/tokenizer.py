"""Reading a checkpoint's tokenizer, configuration and own chat template, without torch."""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from miles_core.errors import ConfigError, RenderError

log = logging.getLogger("miles.tito")


class Encoder(Protocol):
    """What turns text into ids and back: the checkpoint's own tokenizer, or its proved stand-in."""

    @property
    def added(self) -> Mapping[str, int]:
        """Every added token (special or not) by its text."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens marked special."""
        ...

    @property
    def size(self) -> int:
        """How many tokens there are, added ones included."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of text; nothing is added. Raises UnicodeEncodeError or TypeError for text that is not Unicode."""
        ...

    def encode_array(self, text: str) -> array[int]:
        """The same as int32."""
        ...

    def cut(self, text: str, at: frozenset[int]) -> list[tuple[int | None, str]] | None:
        """The text cut at the added tokens `at`, each with the text behind it; None if it cannot be told."""
        ...

    def split(self, text: str, at: frozenset[int]) -> list[tuple[int | None, str]] | None:
        """The same, where every place at which one of them is spelled is a cut; None if that is not sure."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; unknown ids are skipped."""
        ...

    def token_to_id(self, text: str) -> int | None:
        """The id of a token by its spelling in the vocabulary."""
        ...

    def id_to_token(self, number: int) -> str | None:
        """The token's spelling in the vocabulary."""
        ...


class WholeEncoder:
    """The checkpoint's tokenizer itself."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        decoder = backend.get_added_tokens_decoder()
        self.added = {token.content: number for number, token in decoder.items()}
        self.special_ids = frozenset(number for number, token in decoder.items() if token.special)
        self.size: int = backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Ids of text. Without offsets, and as a batch: that is faster, and lets other threads run."""
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def encode_array(self, text: str) -> array[int]:
        """Ids of text as int32."""
        return array("i", self.encode(text))

    def cut(self, text: str, at: frozenset[int]) -> list[tuple[int | None, str]] | None:
        """Never told: a tokenizer's added tokens may take what is around them."""
        return None

    split = cut

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, special tokens spelled out."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text

    def token_to_id(self, text: str) -> int | None:
        """The id of a token by its spelling."""
        found: int | None = self._backend.token_to_id(text)
        return found

    def id_to_token(self, number: int) -> str | None:
        """The token's spelling."""
        found: str | None = self._backend.id_to_token(number)
        return found


class Tokenizer:
    """The checkpoint's tokenizer: text to ids and back, nothing added on the way.

    `vocab_size` is the number of ids the model has rows for: `vocab_size` of the checkpoint's config
    (padding included), else the tokenizer's own length.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer | Encoder, *, source: str = "", config: dict[str, Any] | None = None
    ) -> None:
        self._encoder: Encoder = WholeEncoder(backend) if isinstance(backend, tokenizers.Tokenizer) else backend
        self.source = source
        self.config = config or {}
        self.vocab_size = _vocab_size(self.config) or self._encoder.size
        self.decode = self._encoder.decode
        """Text of ids, special tokens spelled out; unknown ids are skipped."""
        self.token_to_id = self._encoder.token_to_id
        """The id of the token spelled so, or None if the vocabulary has none."""
        self.id_to_token = self._encoder.id_to_token
        """The token's spelling in the vocabulary (byte-level alphabets are not decoded), or None."""
        self.cut = self._encoder.cut
        """Text cut at added tokens, into parts tokenized apart from each other; None if that cannot be told."""
        self.split = self._encoder.split
        """The same, wherever one of these tokens is spelled; None if it may not be cut there."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; spelled-out control tokens become those tokens. Raises RenderError on lone surrogates."""
        try:
            return self._encoder.encode(text)
        except (UnicodeEncodeError, TypeError) as error:
            raise RenderError(f"the text to tokenize is not valid Unicode: {error}") from error

    def encode_array(self, text: str) -> array[int]:
        """The same as int32, which a prompt of any length is built from without a Python object for each id."""
        try:
            return self._encoder.encode_array(text)
        except (UnicodeEncodeError, TypeError) as error:
            raise RenderError(f"the text to tokenize is not valid Unicode: {error}") from error

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Every added token (special or not) by its text."""
        return self._encoder.added

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens marked special."""
        return self._encoder.special_ids

    def ids_of(self, texts: Sequence[str], *, needed_by: str) -> tuple[int, ...]:
        """Ids of tokens given by text. Raises ConfigError naming the ones this checkpoint lacks."""
        ids = [self.token_to_id(t) for t in texts]
        missing = [t for t, i in zip(texts, ids, strict=True) if i is None]
        if missing:
            raise ConfigError(
                f"{needed_by} needs the tokens {', '.join(map(repr, missing))}, which the tokenizer of "
                f"{self.source or 'this checkpoint'} does not have; is this the right family for the checkpoint?"
            )
        return tuple(i for i in ids if i is not None)


def _vocab_size(config: dict[str, Any]) -> int | None:
    for part in (config, config.get("text_config")):
        size = part.get("vocab_size") if isinstance(part, dict) else None
        if type(size) is int and size > 0:  # true is no size
            return size
    return None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds {type(data).__name__}, expected a JSON object")
    return data


def load_tokenizer(checkpoint: str | Path, *, fast: bool = False) -> Tokenizer:
    """The tokenizer of a checkpoint directory, or of a Hugging Face id.

    Needs `tokenizer.json` only; a checkpoint without one is read through `transformers` if that is
    installed. `fast` takes the stand-in of `encoder.py` where it is proved equal, which is worth half a second to a
    server. Raises ConfigError saying what is missing.
    """
    root = Path(checkpoint)
    if root.is_dir():
        config = _read_json(root / "config.json")
        file = root / "tokenizer.json"
        if file.is_file():
            encoder = _stand_in(file) if fast else _from_file(file)
            return Tokenizer(encoder, source=str(checkpoint), config=config)
        return Tokenizer(_through_transformers(str(root)), source=str(checkpoint), config=config)
    if root.exists():
        raise ConfigError(f"--checkpoint {checkpoint} is a file; give the directory that holds tokenizer.json")
    if str(checkpoint).count("/") != 1 or str(checkpoint).startswith((".", "/", "~")):
        raise ConfigError(f"--checkpoint {checkpoint}: there is no such directory")
    return _from_hub(str(checkpoint), fast=fast)


def _from_file(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        raise ConfigError(f"cannot read the tokenizer {file}: {error}") from error


def _stand_in(file: Path) -> tokenizers.Tokenizer | Encoder:
    """The faster encoder, if it is proved equal to the file's, whose memory is then given back."""
    from miles_core.tito.encoder import FastEncoder
    from miles_core.tito.tokenizer_file import UnsupportedError

    try:
        encoder = FastEncoder.of(file.read_bytes(), lambda: _from_file(file))
    except (UnsupportedError, OSError) as error:
        original = _from_file(file)
        log.info("%s is used as it is, without a faster encoder: %s", file, error)
        return original
    give_back_memory()
    return encoder


def give_back_memory() -> None:
    """Hand freed memory back to the system, where the C library can: 100 MB after loading a tokenizer."""
    import ctypes

    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return


def _from_hub(name: str, *, fast: bool) -> Tokenizer:
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise ConfigError(
            f"--checkpoint {name} is not a directory; reading it from the hub needs huggingface_hub"
        ) from error
    files: dict[str, str] = {}
    failure: Exception | None = None
    for file in ("tokenizer.json", "config.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json"):
        try:
            files[file] = hf_hub_download(name, file)
        except Exception as error:
            failure = failure or error
            if not files:  # each file is tried again and again where there is no network
                break
    if "tokenizer.json" not in files:
        raise ConfigError(
            f"--checkpoint {name}: no such directory here, and the Hugging Face hub did not give it: {failure}"
        ) from failure
    return load_tokenizer(Path(files["tokenizer.json"]).parent, fast=fast)


def _through_transformers(path: str) -> tokenizers.Tokenizer:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(
            f"{path} has no tokenizer.json; reading it needs transformers: pip install 'miles-plugins[local]'"
        ) from error
    try:
        backend: tokenizers.Tokenizer = AutoTokenizer.from_pretrained(path).backend_tokenizer
    except Exception as error:
        raise ConfigError(
            f"{path} has no tokenizer.json, and transformers cannot read its tokenizer: {error}"
        ) from error
    if not backend.get_vocab_size(with_added_tokens=False):  # transformers makes one of nothing
        raise ConfigError(f"{path} has no tokenizer.json, nor another file with a vocabulary")
    return backend


def load_chat_template(checkpoint: str | Path) -> str | None:
    """The checkpoint's own chat template, or None.

    From `chat_template.jinja`, else `tokenizer_config.json`, else `chat_template.json`, where processors keep it.
    Raises ConfigError for a file that cannot be read.
    """
    root = Path(checkpoint)
    file = root / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {file}: {error}") from error
    for name in ("tokenizer_config.json", "chat_template.json"):
        template = _read_json(root / name).get("chat_template")
        if isinstance(template, list):  # several by name, as a list of pairs or as an object
            named = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
            template = named[0].get("template") if named else None
        elif isinstance(template, dict):
            template = template.get("default")
        if isinstance(template, str):
            return template
    return None


def special_token_variables(checkpoint: str | Path) -> dict[str, str]:
    """`bos_token`, `eos_token` and the like of `tokenizer_config.json`, as templates of checkpoints use them."""
    config = _read_json(Path(checkpoint) / "tokenizer_config.json")
    found: dict[str, str] = {}
    for key, value in config.items():
        if key.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[key] = text
    return found
