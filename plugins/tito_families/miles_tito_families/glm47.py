"""GLM-4.7, GLM-4.7-Flash and GLM-5 (one format), GLM-5.1 and GLM-5.2: role markers open turns, nothing closes them.

A model ends its turn by sampling the marker of whoever speaks next, `<|user|>` or `<|observation|>`, and the next
turn's rendering writes that marker itself, perhaps the other one. So one sampled marker at the end is dropped and
the suffix writes what is due; a generation that ended otherwise (cut off, or `<|endoftext|>`) is kept whole.

The templates are our own and append-only, and keep the reasoning of every turn. They differ from the checkpoints'
where those lose text or rewrite sampled tokens:

* GLM-5.1's own writes a turn without reasoning as `<think></think>` or as a bare `</think>`, decided from the whole
  conversation, so that a later user message can rewrite it. Ours always writes `<think></think>`: that is what its
  own writes while the turn is the last one, and what 5.2 writes.
* Lists of text parts in tool results become text; those of GLM-4.7 and GLM-5 print a Python repr.
* Text before `<think>` or behind a second `</think>` in assistant content stays content.

What a model without reasoning has sampled differs from how history writes it: after the prompt's `<think>` on 4.7
and 5 (history has a bare `</think>`), and after `</think>` with `enable_thinking=False` on 5.1. The session keeps
the sampled tokens; the self-check calls such a turn `assistant_text`.
"""

from miles_core.hookspecs import hookimpl
from miles_core.tito import ElementCalls, ParseFacts, Revision, TitoFamily

_CALLS = ElementCalls(
    opener="<tool_call>",
    closer="</tool_call>",
    name=r"(?P<name>[^<\s]+)",
    parameter=r"<arg_key>(?P<name>(?:(?!</?arg_(?:key|value)>).)*)</arg_key>\s*<arg_value>",
    parameter_end="</arg_value>",
    end="",
    between="",
    # One of the three tags is missing.
    damaged=r"[^<]+</arg_key>\s*<arg_value>|<arg_key>[^<]*(?:<arg_value>|</arg_key>(?!\s*<arg_value>))",
    tokens=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)

# `model_types` as transformers names the configs: Glm4MoeConfig (4.7, and also 4.5 and 4.6, whose format is another),
# Glm4MoeLiteConfig (4.7-Flash), GlmMoeDsaConfig (5, 5.1, 5.2).
_VERIFIED = "the official template's renderings of a set of conversations, and their token ids"

FAMILY = TitoFamily(
    name="glm47",
    summary="GLM-4.7, GLM-4.7-Flash, GLM-5, GLM-5.1 and GLM-5.2",
    checkpoints=(
        "zai-org/GLM-4.7",
        "zai-org/GLM-4.7-Flash",
        "zai-org/GLM-5",
        "zai-org/GLM-5.1",
        "zai-org/GLM-5.2",
    ),
    revisions=(
        Revision(
            name="glm-4.7",
            template="templates/glm47.jinja",
            checkpoints=("zai-org/GLM-4.7", "zai-org/GLM-4.7-Flash", "zai-org/GLM-5"),
            model_types=("glm4_moe", "glm4_moe_lite", "glm_moe_dsa"),
            verified=_VERIFIED,
        ),
        Revision(
            name="glm-5.1",
            template="templates/glm47_glm51.jinja",
            checkpoints=("zai-org/GLM-5.1",),
            model_types=("glm_moe_dsa",),
            verified=_VERIFIED,
        ),
        Revision(
            name="glm-5.2",
            template="templates/glm47_glm52.jinja",
            checkpoints=("zai-org/GLM-5.2",),
            model_types=("glm_moe_dsa",),
            verified=_VERIFIED,
        ),
    ),
    package="miles_tito_families",
    fixed_kwargs={"clear_thinking": False},
    thinking_kwargs=("enable_thinking",),
    content_format="parts",
    allowed_append_roles=("tool", "user", "system", "assistant"),
    turn_end="",
    stop_tokens=("<|user|>", "<|observation|>", "<|endoftext|>"),
    role_stop_tokens=("<|user|>", "<|observation|>"),
    max_trim_tokens=1,
    trailing_tokens=("<|user|>", "<|observation|>", "<|endoftext|>"),
    assistant_opener="<|assistant|>",
    parse_facts=ParseFacts(
        reasoning=("<think>", "</think>"),
        inside_reasoning=("", ""),
        calls=_CALLS,
    ),
    not_written=frozenset({"call_ids", "text_arguments", "argument_types", "outer_space"}),
    sampled_otherwise=frozenset({"no_reasoning"}),
    reasoning_parser="glm45",
    tool_call_parser="glm47",
)


@hookimpl
def tito_family() -> TitoFamily:
    """The facts of GLM's chat format since 4.7."""
    return FAMILY
