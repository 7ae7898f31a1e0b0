"""NVIDIA Nemotron 3 (Nano, Super, Ultra): ChatML with an always present system turn and XML tools and calls.

Nano and Super have one format; Ultra closes its reasoning without line breaks. Values in tool schemas and calls
are spelled as the checkpoints learned them: objects and lists as JSON, other values as Python does (`True`,
`None`), and a list of types in a parameter's schema too (`['boolean', 'null']`).

The templates are our own and append-only: the checkpoints' cut reasoning before the last user message down to
`<think></think>`, which would rewrite sampled tokens; ours keep it (`truncate_history_thinking=False`). `low_effort`
(Super), by which the checkpoint's template rewrites the last user message, changes nothing here for the same reason.
Also kept, where the checkpoints' lose text: parameters that are not a JSON schema, and a tool call's arguments that
are not a JSON object.

A model that did not reason has sampled `</think>` behind the prompt's `<think>` and a newline, while history writes
`<think></think>`: the session keeps the sampled tokens; the self-check calls such a turn `assistant_text`.
"""

from dataclasses import replace

from miles_core.hookspecs import hookimpl
from miles_core.tito import ParseFacts, Revision, TitoFamily
from miles_tito_families.element_calls import FUNCTION_CALLS

_NANO_AND_SUPER = (
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-FP8",
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8",
)
_ULTRA = ("nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16",)

_PARSE_FACTS = ParseFacts(
    reasoning=("<think>", "</think>"),
    after_reasoning="\n",
    calls=FUNCTION_CALLS,
    before_calls="\n",
    after_call="\n",
)

_MODEL_TYPES = ("nemotron_h",)
"""As transformers names the config (NemotronHConfig); Nemotron-H and Nemotron Nano 2 have the same."""
_VERIFIED = "the official template's renderings of a set of conversations, and their token ids"

FAMILY = TitoFamily(
    name="nemotron3",
    summary="NVIDIA Nemotron 3 Nano, Super and Ultra",
    checkpoints=_NANO_AND_SUPER + _ULTRA,
    revisions=(
        Revision(
            name="nemotron3",
            template="templates/nemotron3.jinja",
            checkpoints=_NANO_AND_SUPER,
            model_types=_MODEL_TYPES,
            verified=_VERIFIED,
        ),
        Revision(
            name="ultra",
            template="templates/nemotron3_ultra.jinja",
            checkpoints=_ULTRA,
            parse_facts=replace(_PARSE_FACTS, inside_reasoning=("\n", ""), after_reasoning=""),
            model_types=_MODEL_TYPES,
            verified=_VERIFIED,
        ),
    ),
    package="miles_tito_families",
    fixed_kwargs={"truncate_history_thinking": False},
    thinking_kwargs=("enable_thinking",),
    allowed_append_roles=("tool", "user", "system", "assistant"),
    turn_end="<|im_end|>\n",
    stop_tokens=("<|im_end|>",),
    trailing_tokens=("<|im_end|>", "\n"),
    assistant_opener="<|im_start|>assistant\n",
    # Checkpoints may flag these tags as special tokens; they are text of a turn and bound nothing.
    inner_tokens=("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    parse_facts=_PARSE_FACTS,
    not_written=frozenset({"call_ids", "text_arguments", "argument_types", "outer_space"}),
    sampled_otherwise=frozenset({"no_reasoning"}),
    reasoning_parser="nemotron_3",
    tool_call_parser="qwen3_coder",
)


@hookimpl
def tito_family() -> TitoFamily:
    """The facts of Nemotron 3's chat format."""
    return FAMILY
