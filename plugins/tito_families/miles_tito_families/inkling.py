"""Inkling (Thinking Machines): typed blocks without newlines, an effort line, JSON tool calls.

The template is our own. Three things are peculiar:

- Blocks of empty text are left out, and an assistant turn without any block leaves nothing, as SGLang's renderer
  has it; the checkpoint's template writes an empty block.
- A tool result carries its tool's name, looked up by `tool_call_id` where the message has none. The look-up goes
  to the assistant message before the result and no further back: looking through the whole history would name a
  late result differently than the suffix that was joined when it came, and would mix up ids that turns reuse.
- A turn stops on `<|content_model_end_sampling|>`, with or without a closed block before it, so a checkpoint that
  ends there is whole; see `InklingBound`.
"""

from collections.abc import Sequence
from typing import Any

from miles_core.hookspecs import hookimpl
from miles_core.tito import BoundFamily, ParseFacts, Revision, TitoFamily

_STOP = "<|content_model_end_sampling|>"
_ROLES = ("<|message_model|>", "<|message_user|>", "<|message_system|>", "<|message_tool|>")


class InklingBound(BoundFamily):
    """Closes a turn only where the last block is the model's and the turn has not ended: an empty answer is the
    stop token alone, without a block to close before it."""

    def __init__(self, family: TitoFamily, *rest: Any, **named: Any) -> None:
        super().__init__(family, *rest, **named)
        self._model, *others = self.tokenizer.ids_of(_ROLES, needed_by=f"family {family.name}")
        self._landmarks = frozenset((self._model, *others, *self.stop_ids))

    def join(self, checkpoint_ids: Sequence[int], suffix_ids: Sequence[int]) -> tuple[int, list[int]]:
        last = next((i for i in reversed(checkpoint_ids) if i in self._landmarks), None)
        if last != self._model:
            return len(checkpoint_ids), []
        return super().join(checkpoint_ids, suffix_ids)


FAMILY = TitoFamily(
    name="inkling",
    summary="Thinking Machines' Inkling and Inkling-Small",
    checkpoints=("thinkingmachines/Inkling", "thinkingmachines/Inkling-Small"),
    revisions=(Revision(name="inkling", template="templates/inkling.jinja"),),
    package="miles_tito_families",
    thinking_kwargs=(),
    content_format="parts",
    allowed_append_roles=("tool", "user", "system", "assistant"),
    turn_end="<|end_message|>" + _STOP,
    stop_tokens=(_STOP,),
    trailing_tokens=("<|end_message|>", _STOP),
    assistant_opener="<|message_model|>",
    inner_tokens=(
        "<|content_text|>",
        "<|content_thinking|>",
        "<|content_invoke_tool_json|>",
        "<|content_xml|>",
        "<|end_message|>",
        _STOP,
    ),
    # A closing tag that ends every block, and calls named in their header, are more than ParseFacts can say.
    parse_facts=ParseFacts(),
    reasoning_parser="inkling",
    tool_call_parser="inkling",
    suffix_needs_last_turn=True,
    bound_class=InklingBound,
)


@hookimpl
def tito_family() -> TitoFamily:
    """The facts of Inkling's chat format."""
    return FAMILY
