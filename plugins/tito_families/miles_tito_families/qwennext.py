"""Qwen3 thinking-only models (the 2507 Thinking releases, Qwen3-Next Thinking): Qwen3's format, always reasoning.

Everything is as in the family qwen3, but the generation prompt itself opens the reasoning block, whatever
`enable_thinking` says; a sampled turn starts inside it and carries no opener. The checkpoints' template drops earlier
reasoning when a new user message comes; ours is append-only and writes the block of every assistant turn.
"""

from miles_core.hookspecs import hookimpl
from miles_core.tito import ParseFacts, Revision, TitoFamily
from miles_tito_families.opened_reasoning import OpenedReasoning

FAMILY = TitoFamily(
    name="qwennext",
    summary="Qwen3 thinking-only models: Qwen3-*-Thinking-2507 and Qwen3-Next-80B-A3B-Thinking",
    checkpoints=(
        "Qwen/Qwen3-4B-Thinking-2507",
        "Qwen/Qwen3-30B-A3B-Thinking-2507",
        "Qwen/Qwen3-235B-A22B-Thinking-2507",
        "Qwen/Qwen3-Next-80B-A3B-Thinking",
    ),
    revisions=(Revision(name="qwennext", template="templates/qwennext.jinja"),),
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
        calls=("<tool_call>", "</tool_call>"),
        after_reasoning="\n\n",
    ),
    reasoning_parser="qwen3",
    tool_call_parser="qwen25",
    bound_class=OpenedReasoning,
)


@hookimpl
def tito_family() -> TitoFamily:
    """The facts of the thinking-only Qwen3 chat format."""
    return FAMILY
