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
from miles_core.tito import ParseFacts, Revision, TitoFamily

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
        ),
        Revision(name="glm-5.1", template="templates/glm47_glm51.jinja", checkpoints=("zai-org/GLM-5.1",)),
        Revision(name="glm-5.2", template="templates/glm47_glm52.jinja", checkpoints=("zai-org/GLM-5.2",)),
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
    # The generation prompt opens the reasoning block and calls are not JSON: neither can be said here yet.
    parse_facts=ParseFacts(),
    reasoning_parser="glm45",
    tool_call_parser="glm47",
)


@hookimpl
def tito_family() -> TitoFamily:
    """The facts of GLM's chat format since 4.7."""
    return FAMILY
