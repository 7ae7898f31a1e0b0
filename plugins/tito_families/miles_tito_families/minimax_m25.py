"""MiniMax-M2.5: its own turn markers, XML tool calls in one block, results in one turn.

What is peculiar: a system turn is always written, with a default identity that the kwarg `model_identity` replaces and
with lines for the system message's `current_date` and `current_location`. The generation prompt always opens the
reasoning block, but a turn without reasoning is written without one, as the checkpoint's template does; such a turn
is not what was sampled, and the sampled tokens stay. Only the first message may be a system message: later ones in a
first prompt are not written (the model has no place for them), and none can be appended. Tools are written as
the bare function. A tool message is refused unless the last assistant message called a tool. Arguments that are not a
JSON object stand as text where the parameters would be. The checkpoint's template drops earlier reasoning when a new
user message comes; ours is append-only.
"""

from miles_core.hookspecs import hookimpl
from miles_core.tito import ParseFacts, Revision, TitoFamily
from miles_tito_families.element_calls import INVOKE_CALLS

FAMILY = TitoFamily(
    name="minimax_m25",
    summary="MiniMax-M2.5",
    checkpoints=("MiniMaxAI/MiniMax-M2.5",),
    revisions=(
        Revision(
            name="minimax_m25",
            template="templates/minimax_m25.jinja",
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
    """The facts of MiniMax-M2.5's chat format."""
    return FAMILY
