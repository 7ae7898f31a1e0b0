"""MiniMax-M2.7: its own turn markers, XML tool calls in one block, results in one turn.

The format of MiniMax-M2.5: see `minimax_m25`. The template is the same but for the model's name in the default
identity. That is why it is a family of its own: the name stands in the first prompt, and the tokenizers do not tell
the two models apart.
"""

from miles_core.hookspecs import hookimpl
from miles_core.tito import ParseFacts, Revision, TitoFamily
from miles_tito_families.element_calls import INVOKE_CALLS

FAMILY = TitoFamily(
    name="minimax_m27",
    summary="MiniMax-M2.7",
    checkpoints=("MiniMaxAI/MiniMax-M2.7",),
    revisions=(
        Revision(
            name="minimax_m27",
            template="templates/minimax_m27.jinja",
            # as transformers names the config (MiniMaxM2Config); M2, M2.1, M2.5 and M2.7 have the same
            model_types=("minimax_m2",),
            verified="the official template's renderings of a set of conversations, with the real special tokens",
        ),
    ),
    package="miles_tito_families",
    fixed_kwargs={"clear_thinking": False},
    thinking_kwargs=(),
    content_format="parts",
    allowed_append_roles=("tool", "user", "assistant"),
    turn_end="[e~[\n",
    stop_tokens=("[e~[",),
    trailing_tokens=("[e~[", "\n"),
    assistant_opener="]~b]ai",
    parse_facts=ParseFacts(
        reasoning=("<think>", "</think>"), after_reasoning="\n\n", calls=INVOKE_CALLS, before_calls="\n"
    ),
    not_written=frozenset({"call_ids", "text_arguments", "argument_types"}),
    sampled_otherwise=frozenset({"no_reasoning"}),
    reasoning_parser="minimax-append-think",
    tool_call_parser="minimax-m2",
    suffix_needs_last_turn=True,  # a tool message is refused unless the turn before it called a tool
)


@hookimpl
def tito_family() -> TitoFamily:
    """The facts of MiniMax-M2.7's chat format."""
    return FAMILY
