"""DeepSeek V3.2, whose checkpoints bring a Python encoder instead of a chat template.

The encoder is our own and append-only: DeepSeek's drops the reasoning of earlier turns when a new user message comes,
and refuses turns without reasoning; ours keeps every turn's block, empty where there is none. Thinking turned off
writes none. A run of fewer results than calls leaves its block open, as DeepSeek's encoder does, and more results
than calls, or results without a call, are refused; hence a suffix depends on the last turn's calls. Arguments that are
not a JSON object, on which DeepSeek's encoder fails, become one parameter named `arguments`, as in V4.

The role markers are not special tokens of the checkpoint, so the self-check is given them as boundaries.
"""

from miles_core.hookspecs import hookimpl
from miles_core.tito import ParseFacts, Revision, TitoFamily
from miles_tito_families.deepseek_dsml import (
    ASSISTANT,
    END_THINK,
    EOS,
    THINK,
    THINKING_ALIASES,
    USER,
    DeepseekBound,
    dsml_calls,
)
from miles_tito_families.deepseekv32_encoder import DeepseekV32Encoder

FAMILY = TitoFamily(
    name="deepseekv32",
    summary="DeepSeek V3.2",
    checkpoints=("deepseek-ai/DeepSeek-V3.2",),
    revisions=(
        Revision(
            name="deepseekv32",
            encoder=DeepseekV32Encoder(),
            model_types=("deepseek_v32",),  # as transformers names the config; V3.2-Exp has the same
            may_lack_template=True,
            verified="the renderings of a set of conversations by DeepSeek's encoder; ids with the tokenizer of V3.1",
        ),
    ),
    package="miles_tito_families",
    fixed_kwargs={"drop_thinking": False},
    kwarg_aliases=(THINKING_ALIASES,),
    thinking_kwargs=("thinking",),
    allowed_append_roles=("tool", "user", "system", "assistant"),
    turn_end=EOS,
    stop_tokens=(EOS,),
    trailing_tokens=(EOS,),
    assistant_opener=ASSISTANT,
    boundary_tokens=(USER, ASSISTANT),
    inner_tokens=(THINK, END_THINK),  # special or not, they are text of a turn
    suffix_needs_last_turn=True,
    parse_facts=ParseFacts(
        reasoning=(THINK, END_THINK),
        inside_reasoning=("", ""),
        calls=dsml_calls("function_calls"),
        before_calls="\n\n",
    ),
    reasoning_parser="deepseek-v3",
    tool_call_parser="deepseekv32",
    bound_class=DeepseekBound,
)


@hookimpl
def tito_family() -> TitoFamily:
    """The facts of DeepSeek V3.2's chat format."""
    return FAMILY
