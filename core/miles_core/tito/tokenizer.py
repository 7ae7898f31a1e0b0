"""Reading a checkpoint's tokenizer, configuration and own chat template, without torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from miles_core.errors import ConfigError, RenderError


class Tokenizer:
    """The checkpoint's tokenizer: text to ids and back, nothing added on the way.

    `vocab_size` is the number of ids the model has rows for: `vocab_size` of the checkpoint's config
    (padding included), else the tokenizer's own length.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, *, source: str = "", config: dict[str, Any] | None = None
    ) -> None:
        self._backend = backend
        self.source = source
        self.config = config or {}
        self.vocab_size = _vocab_size(self.config) or backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; spelled-out control tokens become those tokens. Raises RenderError on lone surrogates."""
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RenderError(f"the text to tokenize is not valid Unicode: {error}") from error
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, special tokens spelled out; unknown ids are skipped."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text

    def token_to_id(self, text: str) -> int | None:
        """The id of the token spelled `text`, or None if the vocabulary has none."""
        found: int | None = self._backend.token_to_id(text)
        return found

    def id_to_token(self, token_id: int) -> str | None:
        """The token's spelling in the vocabulary (byte-level alphabets are not decoded)."""
        found: str | None = self._backend.id_to_token(token_id)
        return found

    @cached_property
    def added_tokens(self) -> dict[str, int]:
        """Every added token (special or not) by its text."""
        return {t.content: i for i, t in self._backend.get_added_tokens_decoder().items()}

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens marked special."""
        return frozenset(i for i, t in self._backend.get_added_tokens_decoder().items() if t.special)

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
        if isinstance(part, dict) and isinstance(part.get("vocab_size"), int):
            return int(part["vocab_size"])
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


def load_tokenizer(checkpoint: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint directory, or of a Hugging Face id.

    Needs `tokenizer.json` only; a checkpoint without one is read through `transformers` if that is
    installed. Raises ConfigError saying what is missing.
    """
    root = Path(checkpoint)
    if root.is_dir():
        config = _read_json(root / "config.json")
        file = root / "tokenizer.json"
        if file.is_file():
            try:
                backend = tokenizers.Tokenizer.from_file(str(file))
            except Exception as error:
                raise ConfigError(f"cannot read the tokenizer {file}: {error}") from error
            return Tokenizer(backend, source=str(checkpoint), config=config)
        return Tokenizer(_through_transformers(str(root)), source=str(checkpoint), config=config)
    if root.exists():
        raise ConfigError(f"--checkpoint {checkpoint} is a file; give the directory that holds tokenizer.json")
    if str(checkpoint).count("/") != 1 or str(checkpoint).startswith((".", "/", "~")):
        raise ConfigError(f"--checkpoint {checkpoint}: there is no such directory")
    return _from_hub(str(checkpoint))


def _from_hub(name: str) -> Tokenizer:
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
    if "tokenizer.json" not in files:
        raise ConfigError(
            f"--checkpoint {name}: no such directory here, and the Hugging Face hub did not give it: {failure}"
        ) from failure
    return load_tokenizer(Path(files["tokenizer.json"]).parent)


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
        if isinstance(template, list):
            named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
            template = named.get("default")
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
