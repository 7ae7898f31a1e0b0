"""DeepSeek V4 (Flash and Pro), whose checkpoints bring a Python encoder instead of a chat template.

Both revisions are our own and append-only: every turn keeps its reasoning, which DeepSeek's encoders drop before the
last user message. `deepseekv4` follows the encoder that SGLang carried, `deepseekv4@recipe` DeepSeek's later package,
which newer SGLang uses. Tool results fold into the user's block and are put in order by the calls of the turn before,
so a suffix depends on that turn; an older turn's calls, which SGLang's encoder looks at too, never reorder them.

Where `recipe` departs from the package, each time to keep what was sampled: without tools, in thinking mode, the
package drops all reasoning and ours stays; calls are not sorted by their ids, and results follow the calls as they
stand (the same where ids ascend); nothing is sorted across an assistant turn; integers that the package makes floats
(beyond 64 bits, and `-0`) stay integers. The first turn of a session that starts from system messages and a question is
the package's, but for such an integer in a tool.

System messages cannot be appended: the package moves them to the front. The role markers are not special tokens of
the checkpoint, so the self-check is given them as boundaries.
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
from miles_tito_families.deepseekv4_encoder import DeepseekV4Encoder
from miles_tito_families.deepseekv4_recipe import DeepseekV4Recipe

_MODEL_TYPES = ("deepseek_v4",)  # as transformers names the config

FAMILY = TitoFamily(
    name="deepseekv4",
    summary="DeepSeek V4 Flash and Pro",
    checkpoints=("deepseek-ai/DeepSeek-V4-Flash", "deepseek-ai/DeepSeek-V4-Pro"),
    revisions=(
        Revision(
            name="deepseekv4",
            encoder=DeepseekV4Encoder(),
            model_types=_MODEL_TYPES,
            may_lack_template=True,
            verified="the renderings of a set of conversations by SGLang's encoder, and their token ids",
        ),
        Revision(
            name="recipe",
            encoder=DeepseekV4Recipe(),
            model_types=_MODEL_TYPES,
            may_lack_template=True,
            verified="the texts that DeepSeek's own renderer, the package deepseek-recipe, writes",
        ),
    ),
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
    inner_tokens=(THINK, END_THINK),  # special or not, they are text of a turn
    # With thinking off, `recipe` keeps the reasoning of an appended assistant turn only beside tools.
    sampled_otherwise=frozenset({"no_reasoning"}),  # `recipe` writes no opening tag then
    suffix_needs_tools=True,
    suffix_needs_last_turn=True,
    parse_facts=ParseFacts(
        reasoning=(THINK, END_THINK),
        inside_reasoning=("", ""),
        calls=dsml_calls("tool_calls"),
        before_calls="\n\n",
    ),
    reasoning_parser="deepseek-v4",
    tool_call_parser="deepseekv4",
    bound_class=DeepseekBound,
)


@hookimpl
def tito_family() -> TitoFamily:
    """The facts of DeepSeek V4's chat format."""
    return FAMILY
