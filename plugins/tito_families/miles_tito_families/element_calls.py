"""XML-like tool calls that several families share."""

from miles_core.tito import ElementCalls

FUNCTION_CALLS = ElementCalls(
    opener="<tool_call>",
    closer="</tool_call>",
    # No name holds its own tag: else each of a row of unfinished tags would be looked at through the whole row.
    name=r"<function=(?P<name>(?:(?!<function=)[^>\n])+)>",
    # A name that holds `>` or `<` is told by the line break that the template writes behind the tag.
    parameter=r"<parameter=(?P<name>[^<\n]*?(?=>\n)|[^<>\n]*|(?:(?!<parameter=)[^>\n])*(?=>\n))>",
    parameter_end="</parameter>",
    end="</function>",
    around_value="\n",
    damaged="<parameter=",
    python_literals=True,
    tokens=("<tool_call>", "</tool_call>"),
)
"""`<function=NAME>` with `<parameter=KEY>` elements, one call a block: Qwen3.5 and Nemotron 3."""

INVOKE_CALLS = ElementCalls(
    opener="<minimax:tool_call>",
    closer="</minimax:tool_call>",
    call_start="<invoke ",
    call_ends=("</invoke>",),
    name=r'<invoke name="(?P<name>[^"\n]+)">',
    parameter=r'<parameter name="(?P<name>(?:(?!<parameter )[^\n])*?)">',
    parameter_end="</parameter>",
    end="</invoke>",
    damaged="<parameter name=",
    tokens=("<minimax:tool_call>", "</minimax:tool_call>"),
)
"""`<invoke name="NAME">` with `<parameter name="KEY">` elements, any number of calls a block: MiniMax M2."""
