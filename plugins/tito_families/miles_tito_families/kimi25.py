"""Kimi K2.5 (Moonshot AI): typed turns without newlines, reasoning in every turn, calls named by their id.

The encoder is our own. What is peculiar:

- Tools are written as TypeScript, which is what the checkpoint's tokenizer class serves; its template alone would
  write JSON.
- The checkpoint drops the reasoning of all turns up to the last final answer; `preserve_thinking` keeps it.
- With `thinking=False` no turn shows reasoning. A session that turns thinking off half-way keeps the reasoning that
  was sampled, and the self-check says so.
- The first release put in a system prompt of its own where there was none; that was dropped, and is not here.
"""

from miles_core.hookspecs import hookimpl
from miles_core.tito import ParseFacts, Revision, TitoFamily
from miles_tito_families.kimi_calls import KimiCalls
from miles_tito_families.kimi_encoder import KimiEncoder
from miles_tito_families.kimi_tools import template_variables

FAMILY = TitoFamily(
    name="kimi25",
    summary="Kimi K2.5",
    checkpoints=("moonshotai/Kimi-K2.5",),
    revisions=(
        Revision(
            name="kimi25",
            encoder=KimiEncoder(source="miles_tito_families/kimi_encoder.py (kimi25)", off_blanks_reasoning=True),
            # as transformers names the config (Kimi_K25Config); K2.5 and K2.6 have the same
            model_types=("kimi_k25",),
            verified="the official template's renderings of a set of conversations, and their token ids",
        ),
    ),
    package="miles_tito_families",
    fixed_kwargs={"preserve_thinking": True},
    template_variables=template_variables,
    thinking_kwargs=("thinking",),
    content_format="parts",
    allowed_append_roles=("tool", "user", "system", "assistant"),
    turn_end="<|im_end|>",
    stop_tokens=("<|im_end|>",),
    trailing_tokens=("<|im_end|>",),
    assistant_opener="<|im_assistant|>",
    inner_tokens=("<|im_middle|>",),
    parse_facts=ParseFacts(reasoning=("<think>", "</think>"), inside_reasoning=("", ""), calls=KimiCalls()),
    not_written=frozenset({"call_names", "text_arguments"}),
    reasoning_parser="kimi_k2",
    tool_call_parser="kimi_k2",
)


@hookimpl
def tito_family() -> TitoFamily:
    """The facts of Kimi K2.5's chat format."""
    return FAMILY
