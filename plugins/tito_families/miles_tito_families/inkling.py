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

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from miles_core.hookspecs import hookimpl
from miles_core.tito import BoundFamily, ParseFacts, Revision, StreamParser, TextStream, TitoFamily
from miles_tito_families.inkling_parser import CALL, END, MODEL, TEXT, THINKING, InklingParser

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

    @property
    def reads(self) -> frozenset[str]:
        """Reasoning and calls, by their blocks."""
        return frozenset({"reasoning", "calls"})

    @property
    def reasoning_end(self) -> str:
        """The token that closes a block: the first one is the reasoning."""
        return END

    @cached_property
    def hidden_ids(self) -> frozenset[int]:
        """Without the tokens that the parser reads."""
        seen = self.tokenizer.ids_of((MODEL, THINKING, TEXT, CALL, END), needed_by=f"family {self.name}")
        return super().hidden_ids - frozenset(seen)

    def parser(
        self,
        tools: Any = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        prompt_ids: Sequence[int] | None = None,
        calls: bool = True,
        reasoning: bool = True,
    ) -> StreamParser:
        """A parser of blocks; the prompt always opens the first one."""
        return InklingParser(TextStream(self.tokenizer, self.hidden_ids), calls=calls, reasoning=reasoning)


FAMILY = TitoFamily(
    name="inkling",
    summary="Thinking Machines' Inkling and Inkling-Small",
    checkpoints=("thinkingmachines/Inkling", "thinkingmachines/Inkling-Small"),
    revisions=(
        Revision(
            name="inkling",
            template="templates/inkling.jinja",
            # as transformers names the configs (InklingConfig, InklingTextConfig); SGLang's text config is the last
            model_types=("inkling_mm_model", "inkling_text", "inkling_model"),
            may_lack_template=True,  # SGLang renders Inkling with code of its own: "no Jinja chat_template"
            verified="renderings of a set of conversations by SGLang's rules, and their token ids",
        ),
    ),
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
    parse_facts=ParseFacts(),  # `InklingParser` reads the blocks
    not_written=frozenset({"call_ids", "text_arguments", "text_blocks"}),
    sampled_otherwise=frozenset({"empty"}),
    template_differs={"call-alone": "it writes an empty block where a turn has no text, as SGLang does not"},
    reasoning_parser="inkling",
    tool_call_parser="inkling",
    suffix_needs_last_turn=True,
    bound_class=InklingBound,
)


@hookimpl
def tito_family() -> TitoFamily:
    """The facts of Inkling's chat format."""
    return FAMILY
