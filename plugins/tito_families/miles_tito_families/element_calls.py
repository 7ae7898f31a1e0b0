"""XML-like tool calls that several families share."""

from miles_core.tito import ElementCalls

FUNCTION_CALLS = ElementCalls(
    opener="<tool_call>",
    closer="</tool_call>",
    name=r"<function=(?P<name>[^>\n]+)>",
    parameter=r"<parameter=(?P<name>[^>\n]+)>",
    parameter_end="</parameter>",
    end="</function>",
    around_value="\n",
    python_literals=True,
    tokens=("<tool_call>", "</tool_call>"),
)
"""`<function=NAME>` with `<parameter=KEY>` elements, one call a block: Qwen3.5 and Nemotron 3."""

INVOKE_CALLS = ElementCalls(
    opener="<minimax:tool_call>",
    closer="</minimax:tool_call>",
    call_end="</invoke>",
    name=r'<invoke name="(?P<name>[^"\n]+)">',
    parameter=r'<parameter name="(?P<name>[^"\n]+)">',
    parameter_end="</parameter>",
    end="</invoke>",
    tokens=("<minimax:tool_call>", "</minimax:tool_call>"),
)
"""`<invoke name="NAME">` with `<parameter name="KEY">` elements, any number of calls a block: MiniMax M2."""
