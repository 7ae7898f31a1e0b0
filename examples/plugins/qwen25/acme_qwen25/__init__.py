"""Qwen2.5-Instruct (0.5B to 72B): ChatML without reasoning, tool calls in JSON, a system prompt where none is given.

Its own template appends already, so ours writes what that writes. SGLang's parser `qwen25` writes the arguments of
calls anew, and leaves out calls of functions that the request does not name; ours hands out what was sampled. It is
registered in an SGLang that is started with `--engine sglang`.
"""

from miles_core import hookimpl
from miles_core.engine.sglang_parsers import register_tool_call_parser
from miles_core.tito import JsonCalls, ParseFacts, Revision, TitoFamily

PARSER = "acme_qwen25"

FAMILY = TitoFamily(
    name="qwen25",
    summary="Qwen2.5-Instruct, 0.5B to 72B",
    checkpoints=("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-72B-Instruct"),
    revisions=(Revision(name="qwen25", template="qwen25.jinja", model_types=("qwen2",)),),
    package="acme_qwen25",
    allowed_append_roles=("tool", "user", "system", "assistant"),
    turn_end="<|im_end|>\n",
    stop_tokens=("<|im_end|>", "<|endoftext|>"),
    trailing_tokens=("<|im_end|>", "<|endoftext|>", "\n"),
    assistant_opener="<|im_start|>assistant",
    parse_facts=ParseFacts(calls=JsonCalls(), before_calls="\n", between_calls="\n"),
    not_written=frozenset({"call_ids", "text_arguments"}),
    thinking_kwargs=(),
    tool_call_parser=PARSER,
)


@hookimpl
def tito_family() -> TitoFamily:
    """The facts of Qwen2.5's chat format."""
    return FAMILY


@hookimpl
def configure_sglang(server_args: object) -> None:
    """Register our parser in this process of SGLang."""
    register_tool_call_parser(PARSER, FAMILY.parse_facts, like="qwen25")
