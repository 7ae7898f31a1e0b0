"""Qwen3 hybrid-thinking models (0.6B to 235B): ChatML with reasoning blocks and JSON tool calls.

The template is our own and append-only: the checkpoint's drops earlier reasoning when a new user message
comes, which would rewrite tokens that were sampled; ours writes the block of every assistant turn.
"""

from miles_core.hookspecs import hookimpl
from miles_core.tito import JsonCalls, ParseFacts, Revision, TitoFamily

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
    revisions=(
        Revision(
            name="qwen3",
            template="templates/qwen3.jinja",
            # as transformers names the configs (Qwen3Config, Qwen3MoeConfig); other models have the same
            model_types=("qwen3", "qwen3_moe"),
            verified="the official template's renderings of a set of conversations, and their token ids",
        ),
    ),
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
        after_reasoning="\n\n",
        calls=JsonCalls(),
        before_calls="\n",
        between_calls="\n",
    ),
    not_written=frozenset({"call_ids", "text_arguments", "outer_space"}),
    reasoning_parser="qwen3",
    tool_call_parser="qwen25",
)


@hookimpl
def tito_family() -> TitoFamily:
    """The facts of Qwen3's chat format."""
    return FAMILY
