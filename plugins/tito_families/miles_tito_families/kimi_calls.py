"""How Kimi's tool calls are read: an id that tells the function, and its arguments as JSON."""

from __future__ import annotations

import re
from dataclasses import dataclass

from miles_core.tito import Call, Malformed, Reading, ToolSchemas, Unfinished
from miles_core.tito.arguments import read_json
from miles_core.tito.calls import in_json_string

_CALL = re.compile(
    r"\s*<\|tool_call_begin\|>(?P<id>(?:(?!<\|tool_call).)*)<\|tool_call_argument_begin\|>"
    r"(?P<arguments>.*)<\|tool_call_end\|>\Z",
    re.DOTALL,
)
_ID = re.compile(r"(?:functions\.)?(?P<name>.*?)(?::\d+)?\Z", re.DOTALL)


@dataclass(frozen=True)
class KimiCalls:
    """Calls in one section. The id is kept as it was sampled, since history writes nothing else of the name.

    `functions.NAME:INDEX` is the form the model learned; of an id in another form, all of it is the name.
    """

    opener: str = "<|tool_calls_section_begin|>"
    closer: str = "<|tool_calls_section_end|>"
    call_end: str = "<|tool_call_end|>"
    tokens: tuple[str, ...] = (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    )

    def read(self, text: str, schemas: ToolSchemas) -> Reading:
        """The call that the text is."""
        found = _CALL.match(text)
        if found is None:
            return Malformed("it has no id and arguments")
        value, valid = read_json(found["arguments"].strip())
        if not valid:
            return Unfinished() if in_json_string(found["arguments"]) else Malformed("its arguments are not JSON")
        if not isinstance(value, dict):
            return Malformed("its arguments are not an object")
        name = _ID.match(found["id"].strip())
        if name is None or not name["name"]:
            return Malformed("its id names no function")
        return Call(name["name"], found["arguments"].strip(), found["id"].strip())
