"""MiniMax-M2.7: its own turn markers, XML tool calls in one block, results in one turn.

The format of MiniMax-M2.5: see `minimax_m25`. The template is the same but for the model's name in the default
identity. That is why it is a family of its own: the name stands in the first prompt, and the tokenizers do not tell
the two models apart.
"""

from miles_core.hookspecs import hookimpl
from miles_core.tito import ParseFacts, Revision, TitoFamily
from miles_tito_families.opened_reasoning import OpenedReasoning

FAMILY = TitoFamily(
    name="minimax_m27",
    summary="MiniMax-M2.7",
    checkpoints=("MiniMaxAI/MiniMax-M2.7",),
    revisions=(Revision(name="minimax_m27", template="templates/minimax_m27.jinja"),),
    package="miles_tito_families",
    fixed_kwargs={"clear_thinking": False},
    thinking_kwargs=(),
    content_format="parts",
    allowed_append_roles=("tool", "user", "assistant"),
    turn_end="[e~[\n",
    stop_tokens=("[e~[",),
    trailing_tokens=("[e~[", "\n"),
    assistant_opener="]~b]ai",
    parse_facts=ParseFacts(reasoning=("<think>", "</think>"), after_reasoning="\n\n"),
    reasoning_parser="minimax-append-think",
    tool_call_parser="minimax-m2",
    bound_class=OpenedReasoning,
    suffix_needs_last_turn=True,  # a tool message is refused unless the turn before it called a tool
)


@hookimpl
def tito_family() -> TitoFamily:
    """The facts of MiniMax-M2.7's chat format."""
    return FAMILY
