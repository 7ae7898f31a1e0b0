"""Qwen3.5, dense and mixture-of-experts: ChatML with reasoning blocks and XML tool calls.

Content, reasoning and tool results are written without white space around them; the tool block stands before the
system text; a system message is possible only at the start, so it cannot be appended. The generation prompt opens the
reasoning block, or with `enable_thinking` false closes it at once. Thinking is the default here for every size, where
small checkpoints think only when told to. The checkpoints' template drops earlier reasoning when a new user message
comes, and refuses a conversation without one; ours is append-only and refuses neither. Arguments that are not a JSON
object stand as text where the parameters would be. Content with a reasoning block in its middle stays as it is: the
checkpoints' template would lose what comes before the block.
"""

from miles_core.hookspecs import hookimpl
from miles_core.tito import ParseFacts, Revision, TitoFamily
from miles_tito_families.element_calls import FUNCTION_CALLS

FAMILY = TitoFamily(
    name="qwen35",
    summary="Qwen3.5, dense and MoE, text only",
    checkpoints=(
        "Qwen/Qwen3.5-0.8B",
        "Qwen/Qwen3.5-2B",
        "Qwen/Qwen3.5-4B",
        "Qwen/Qwen3.5-9B",
        "Qwen/Qwen3.5-27B",
        "Qwen/Qwen3.5-35B-A3B",
        "Qwen/Qwen3.5-122B-A10B",
        "Qwen/Qwen3.5-397B-A17B",
    ),
    revisions=(
        Revision(
            name="qwen35",
            template="templates/qwen35.jinja",
            # as transformers names the configs (Qwen3_5Config, Qwen3_5MoeConfig and their text configs)
            model_types=("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"),
            verified="the official template's renderings of a set of conversations, and their token ids",
        ),
    ),
    package="miles_tito_families",
    fixed_kwargs={"clear_thinking": False},
    thinking_kwargs=("enable_thinking",),
    template_differs={"question": "small checkpoints think only when they are told to"},
    content_format="parts",
    allowed_append_roles=("tool", "user", "assistant"),
    turn_end="<|im_end|>\n",
    stop_tokens=("<|im_end|>", "<|endoftext|>"),
    trailing_tokens=("<|im_end|>", "<|endoftext|>", "\n"),
    assistant_opener="<|im_start|>assistant",
    parse_facts=ParseFacts(
        reasoning=("<think>", "</think>"),
        after_reasoning="\n\n",
        calls=FUNCTION_CALLS,
        before_calls="\n\n",
        between_calls="\n",
    ),
    not_written=frozenset({"call_ids", "text_arguments", "argument_types", "outer_space"}),
    reasoning_parser="qwen3",
    tool_call_parser="qwen3_coder",
)


@hookimpl
def tito_family() -> TitoFamily:
    """The facts of Qwen3.5's chat format."""
    return FAMILY
