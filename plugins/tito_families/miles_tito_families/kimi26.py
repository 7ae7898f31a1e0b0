"""Kimi K2.6 (Moonshot AI): K2.5's format with a `preserve_thinking` of its own.

It differs from K2.5 in two things: reasoning is read from `reasoning` first, then from `reasoning_content`; and
with `thinking=False` earlier turns still show theirs, although the prompt closes the block. The tool-call parser
must hand out ids as they were sampled, since ids are all that history writes of a function's name: `kimi_k2`
renumbers them, `kimi_k2_raw_id` does not. SGLang 0.5.23 lacks it; this plugin registers it in an SGLang that is
started with `--engine sglang`.
"""

from miles_core.engine.sglang_parsers import register_tool_call_parser
from miles_core.hookspecs import hookimpl
from miles_core.tito import ParseFacts, Revision, TitoFamily
from miles_tito_families.kimi_calls import KimiCalls
from miles_tito_families.kimi_encoder import KimiEncoder
from miles_tito_families.kimi_tools import template_variables

FAMILY = TitoFamily(
    name="kimi26",
    summary="Kimi K2.6",
    checkpoints=("moonshotai/Kimi-K2.6",),
    revisions=(
        Revision(
            name="kimi26",
            encoder=KimiEncoder(
                source="miles_tito_families/kimi_encoder.py (kimi26)",
                reasoning_keys=("reasoning", "reasoning_content"),
            ),
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
    tool_call_parser="kimi_k2_raw_id",
)


@hookimpl
def tito_family() -> TitoFamily:
    """The facts of Kimi K2.6's chat format."""
    return FAMILY


@hookimpl
def configure_sglang(server_args: object) -> None:
    """Register the parser that hands out calls under the ids that the model sampled."""
    assert FAMILY.tool_call_parser is not None
    register_tool_call_parser(FAMILY.tool_call_parser, FAMILY.parse_facts, like="kimi_k2")
