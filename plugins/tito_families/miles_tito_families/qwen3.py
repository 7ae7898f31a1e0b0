"""Qwen3 hybrid-thinking models (0.6B to 235B): ChatML with reasoning blocks and JSON tool calls.

The template is our own and append-only: the checkpoint's drops earlier reasoning when a new user message
comes, which would rewrite tokens that were sampled; ours writes the block of every assistant turn.
"""

from miles_core.hookspecs import hookimpl
from miles_core.tito import ParseFacts, Revision, TitoFamily

FAMILY = TitoFamily(
    name="qwen3",
    summary="Qwen3 hybrid-thinking models, 0.6B to 235B-A22B",
    checkpoints=(
        "Qwen/Qwen3-0.6B",
        "Qwen/Qwen3-4B",
        "Qwen/Qwen3-8B",
        "Qwen/Qwen3-30B-A3B",
        "Qwen/Qwen3-235B-A22B",
    ),
    revisions=(Revision(name="qwen3", template="templates/qwen3.jinja"),),
    package="miles_tito_families",
    fixed_kwargs={"clear_thinking": False},
    thinking_kwargs=("enable_thinking",),
    allowed_append_roles=("tool", "user", "system", "assistant"),
    turn_end="<|im_end|>\n",
    stop_tokens=("<|im_end|>", "<|endoftext|>"),
    trailing_tokens=("<|im_end|>", "<|endoftext|>", "\n"),
    assistant_opener="<|im_start|>assistant",
    parse_facts=ParseFacts(
        reasoning=("<think>", "</think>"),
        calls=("<tool_call>", "</tool_call>"),
        after_reasoning="\n\n",
    ),
    reasoning_parser="qwen3",
    tool_call_parser="qwen25",
)


@hookimpl
def tito_family() -> TitoFamily:
    """The facts of Qwen3's chat format."""
    return FAMILY
