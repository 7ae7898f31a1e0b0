"""DeepSeek V4 (Flash and Pro), whose checkpoints bring a Python encoder instead of a chat template.
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
)
from miles_tito_families.deepseekv4_encoder import DeepseekV4Encoder

FAMILY = TitoFamily(
    name="deepseekv4",
    summary="DeepSeek V4 Flash and Pro",
    checkpoints=("deepseek-ai/DeepSeek-V4-Flash", "deepseek-ai/DeepSeek-V4-Pro"),
    revisions=(Revision(name="deepseekv4", encoder=DeepseekV4Encoder()),),
    package="miles_tito_families",
    fixed_kwargs={"drop_thinking": False},
    kwarg_aliases=(THINKING_ALIASES,),
    thinking_kwargs=("thinking",),
    allowed_append_roles=("tool", "user", "assistant"),
    turn_end=EOS,
    stop_tokens=(EOS,),
    trailing_tokens=(EOS, ASSISTANT, THINK, END_THINK),
    assistant_opener=ASSISTANT,
    boundary_tokens=(USER, ASSISTANT),
    suffix_needs_last_turn=True,
    parse_facts=ParseFacts(),
    reasoning_parser="deepseek-v4",
    tool_call_parser="deepseekv4",
    bound_class=DeepseekBound,
)


@hookimpl
def tito_family() -> TitoFamily:
    """The facts of DeepSeek V4's chat format."""
    return FAMILY
