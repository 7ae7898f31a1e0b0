"""Qwen3 thinking-only models (the 2507 Thinking releases, Qwen3-Next Thinking): Qwen3's format, always reasoning.

Everything is as in the family qwen3, but the generation prompt itself opens the reasoning block, whatever
`enable_thinking` says; a sampled turn starts inside it and carries no opener. The checkpoints' template drops earlier
reasoning when a new user message comes; ours is append-only and writes the block of every assistant turn.
"""

from miles_core.hookspecs import hookimpl
from miles_core.tito import JsonCalls, ParseFacts, Revision, TitoFamily

FAMILY = TitoFamily(
    name="qwennext",
    summary="Qwen3 thinking-only models: Qwen3-*-Thinking-2507 and Qwen3-Next-80B-A3B-Thinking",
    checkpoints=(
        "Qwen/Qwen3-4B-Thinking-2507",
        "Qwen/Qwen3-30B-A3B-Thinking-2507",
        "Qwen/Qwen3-235B-A22B-Thinking-2507",
        "Qwen/Qwen3-Next-80B-A3B-Thinking",
    ),
    revisions=(
        Revision(
            name="qwennext",
            template="templates/qwennext.jinja",
            # as transformers names the configs (Qwen3Config, Qwen3MoeConfig, Qwen3NextConfig); others have the same
            model_types=("qwen3", "qwen3_moe", "qwen3_next"),
            verified="the official template's renderings of a set of conversations, and their token ids",
        ),
    ),
    package="miles_tito_families",
    fixed_kwargs={"clear_thinking": False},
    thinking_kwargs=(),
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
    """The facts of the thinking-only Qwen3 chat format."""
    return FAMILY
