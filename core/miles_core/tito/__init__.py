"""Token in, token out: what a model family's chat format is, and how turns join. Pure; no I/O but loading."""

from miles_core.tito.arguments import ToolSchemas
from miles_core.tito.bound import BoundFamily
from miles_core.tito.calls import Call, CallFormat, CallReader, JsonCalls, Malformed, Reading, Unfinished
from miles_core.tito.compare import compare_tokens
from miles_core.tito.elements import ElementCalls
from miles_core.tito.family import Revision, TitoFamily
from miles_core.tito.inverse import parse_difference
from miles_core.tito.json_text import JsonText
from miles_core.tito.parse import ParseFacts, StreamParser
from miles_core.tito.render import ChatTemplate, Renderer, normalise_messages, normalise_tools
from miles_core.tito.stream import TextStream
from miles_core.tito.tokenizer import Tokenizer, load_chat_template, load_tokenizer

__all__ = [
    "BoundFamily",
    "Call",
    "CallFormat",
    "CallReader",
    "ChatTemplate",
    "ElementCalls",
    "JsonCalls",
    "JsonText",
    "Malformed",
    "ParseFacts",
    "Reading",
    "Renderer",
    "Revision",
    "StreamParser",
    "TextStream",
    "TitoFamily",
    "Tokenizer",
    "ToolSchemas",
    "Unfinished",
    "compare_tokens",
    "load_chat_template",
    "load_tokenizer",
    "normalise_messages",
    "normalise_tools",
    "parse_difference",
]
