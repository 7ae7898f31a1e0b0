"""Token in, token out: what a model family's chat format is, and how turns join. Pure; no I/O but loading."""

from miles_core.tito.compare import compare_tokens
from miles_core.tito.family import BoundFamily, Renderer, Revision, TitoFamily
from miles_core.tito.parse import ParseFacts, StreamParser
from miles_core.tito.render import ChatTemplate, normalise_messages, normalise_tools
from miles_core.tito.tokenizer import Tokenizer, load_chat_template, load_tokenizer

__all__ = [
    "BoundFamily",
    "ChatTemplate",
    "ParseFacts",
    "Renderer",
    "Revision",
    "StreamParser",
    "TitoFamily",
    "Tokenizer",
    "compare_tokens",
    "load_chat_template",
    "load_tokenizer",
    "normalise_messages",
    "normalise_tools",
]
