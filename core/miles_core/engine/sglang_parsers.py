"""A family's own reading of tool calls as one of SGLang's tool-call parsers; for `configure_sglang`.

Runs inside SGLang's processes, whose modules are imported when a parser is registered. What SGLang then hands out, in
one piece or streamed, is what the family's parser reads: calls with the arguments and ids that the model spelled, and
what is no well-formed call as text.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Sequence
from typing import Any

from miles_core.tito.arguments import ToolSchemas
from miles_core.tito.parse import Delta, ParseFacts, TaggedParser
from miles_core.tito.stream import TextStream

_GIVES_IDS = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._process_tool_call_id"


def register_tool_call_parser(name: str, facts: ParseFacts, *, like: str | None = None) -> None:
    """Make `--tool-call-parser NAME` known to this SGLang process; one that SGLang brings itself stays as it is.

    `like` is a parser of SGLang's for the same format: what it knows about forcing calls by a grammar
    (`tool_choice="required"`) stays; without one, forced calls come as SGLang's JSON list. Ids that the format writes
    are kept; other calls get SGLang's.
    """
    from sglang.srt.function_call.base_format_detector import BaseFormatDetector
    from sglang.srt.function_call.core_types import StreamingParseResult, ToolCallItem
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    known = FunctionCallParser.ToolCallParserEnum
    if name in known:
        return
    item = type("OwnIdItem", (ToolCallItem,), {"__annotations__": {"call_id": str | None}, "call_id": None})
    own = {"facts": facts, "result": StreamingParseResult, "item": item}
    known[name] = (
        type(name, (_Reading, known[like]), own)
        if like is not None
        else type(name, (_Reading, _NoGrammar, BaseFormatDetector), own)
    )
    if multiprocessing.parent_process() is None:  # the server's process; importing that module costs the others seconds
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(_GIVES_IDS, _own_id, HookType.AROUND)


def _own_id(original: Any, server: Any, call: Any, *args: Any, **kwargs: Any) -> Any:
    """The id that the model wrote, or else SGLang's."""
    return getattr(call, "call_id", None) or original(server, call, *args, **kwargs)


class _Reading:
    """What SGLang asks of a detector, answered by a family's parser."""

    facts: ParseFacts
    result: Any
    item: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reading: TaggedParser | None = None
        self._index = 0

    def has_tool_call(self, text: str) -> bool:
        """Whether a block of calls begins in the text."""
        return self.facts.calls is not None and self.facts.calls.opener in text

    def detect_and_parse(self, text: str, tools: Sequence[Any]) -> Any:
        """Content and calls of a whole answer, without its reasoning."""
        parser = _parser(self.facts, tools)
        return self._as_result([*parser.feed_text(text), *parser.finish()])

    def parse_streaming_increment(self, new_text: str, tools: Sequence[Any]) -> Any:
        """What more text completes: a call comes out whole."""
        self._reading = self._reading or _parser(self.facts, tools)
        return self._as_result(self._reading.feed_text(new_text))

    def finish(self, tools: Sequence[Any]) -> Any:
        """The answer is over: what was held back comes out as text."""
        return self._as_result(self._reading.finish() if self._reading is not None else [])

    def _as_result(self, deltas: Iterable[Delta]) -> Any:
        text, calls = "", []
        for delta in deltas:
            text += delta.get("content", "")
            for call in delta.get("tool_calls", ()):
                function = call["function"]
                calls.append(
                    self.item(
                        tool_index=self._index,
                        name=function["name"],
                        parameters=function["arguments"],
                        call_id=call.get("id"),
                    )
                )
                self._index += 1
        return self.result(normal_text=text, calls=calls)


class _NoGrammar:
    """For formats of which SGLang knows no grammar."""

    def supports_structural_tag(self) -> bool:
        """It has SGLang force calls as a JSON list."""
        return False

    def structure_info(self) -> Any:
        """Never asked for, without structural tags."""
        raise NotImplementedError


class _NoTokens(TextStream):
    """In place of a stream of ids: SGLang's detectors get text."""

    def __init__(self) -> None:
        """Nothing to keep."""

    def finish(self) -> str:
        return ""


def _parser(facts: ParseFacts, tools: Sequence[Any]) -> TaggedParser:
    schemas = ToolSchemas([tool.model_dump() if hasattr(tool, "model_dump") else tool for tool in tools or ()])
    return TaggedParser(facts, _NoTokens(), schemas, reasoning=False)
