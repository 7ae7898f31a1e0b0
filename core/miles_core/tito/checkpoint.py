"""What a checkpoint says of its chat format: configuration, tokenizer and its own template, read once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.errors import RenderError
from miles_core.tito.render import ChatTemplate
from miles_core.tito.tokenizer import Tokenizer, load_chat_template, load_tokenizer, special_token_variables

_EMBEDDING_FILES = ("modules.json", "config_sentence_transformers.json")
_NOT_GENERATING = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "RewardModel")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The facts that detection goes by; the checkpoint's name and path are not among them.

    `template` is the checkpoint's own; None if it has none, or if it does not compile: then `template_error` says why.
    `not_chat` says, in words, why the model does not write chat, where its files tell.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None = None
    template_error: str | None = None
    not_chat: str | None = None

    @property
    def config(self) -> Mapping[str, Any]:
        """The checkpoint's `config.json`; empty if it has none."""
        return self.tokenizer.config

    @property
    def architectures(self) -> tuple[str, ...]:
        """The model classes that the config names."""
        return _architectures(self.config)

    @property
    def model_type(self) -> tuple[str, str] | None:
        """The config's `model_type` and where it was found: at the top, in `text_config`, or in `architectures`.

        From `architectures` it is the class without its task, which is how transformers names the two.
        """
        inner = self.config.get("text_config")
        for where, part in (("model_type", self.config), ("text_config.model_type", inner)):
            value = part.get("model_type") if isinstance(part, Mapping) else None
            if isinstance(value, str) and value:
                return value, where
        for name in self.architectures:
            for task in ("ForCausalLM", "ForConditionalGeneration"):
                if name.endswith(task):
                    return name.removesuffix(task), "architectures"
        return None


def read_checkpoint(checkpoint: str | Path) -> Checkpoint:
    """Read a directory, or a Hugging Face id. Raises ConfigError naming the file that is missing or broken."""
    tokenizer = load_tokenizer(checkpoint)
    root = Path(tokenizer.source)
    text, template, error = load_chat_template(root), None, None
    if text is not None:
        try:
            template = ChatTemplate(text, source=f"{checkpoint}", variables=special_token_variables(root))
        except RenderError as failure:
            error = failure.message
    return Checkpoint(
        tokenizer=tokenizer, template=template, template_error=error, not_chat=_not_chat(root, tokenizer.config)
    )


def _architectures(config: Mapping[str, Any]) -> tuple[str, ...]:
    value = config.get("architectures")
    return tuple(name for name in value if isinstance(name, str)) if isinstance(value, list) else ()


def _not_chat(root: Path, config: Mapping[str, Any]) -> str | None:
    found = [name for name in _EMBEDDING_FILES if (root / name).is_file()]
    if found:
        return f"{found[0]} says that it is an embedding model"
    names = _architectures(config)
    if names and all(name.endswith(_NOT_GENERATING) for name in names):
        return f"architectures {', '.join(names)} is no model that generates"
    return None
