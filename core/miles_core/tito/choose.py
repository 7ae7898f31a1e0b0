"""Which revision of a family a checkpoint is: the one whose text agrees with the checkpoint's own template."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.errors import MilesError
from miles_core.tito.render import ChatTemplate, normalise_messages, normalise_tools
from miles_core.tito.tokenizer import Tokenizer, load_chat_template, special_token_variables
from miles_core.types import Message, Tool

if TYPE_CHECKING:
    from miles_core.tito.family import Renderer, Revision, TitoFamily

log = logging.getLogger("miles.tito")

_TOOL = {
    "type": "function",
    "function": {
        "name": "weigh",
        "description": "Weigh a parcel.",
        "parameters": {"type": "object", "properties": {"parcel": {"type": "string"}}, "required": ["parcel"]},
        "strict": True,
    },
}
_CALL = {"id": "functions.weigh:0", "type": "function", "function": {"name": "weigh", "arguments": '{"parcel": "A 1"}'}}
_ASK: Message = {"role": "user", "content": "How heavy is A 1?"}
_CALLING: Message = {"role": "assistant", "content": "", "reasoning_content": "weigh it", "tool_calls": [_CALL]}

PROBES: tuple[tuple[tuple[Message, ...], list[dict[str, Any]] | None, Mapping[str, Any]], ...] = (
    ((_ASK,), None, {}),
    (({"role": "system", "content": "Be brief."}, _ASK), [_TOOL], {}),
    ((_ASK,), [_TOOL], {"enable_thinking": False, "thinking": False}),
    ((_ASK, _CALLING, {"role": "tool", "tool_call_id": "functions.weigh:0", "content": "3 kg"}), [_TOOL], {}),
    ((_ASK, {"role": "assistant", "content": "Heavy."}, _ASK), None, {}),
)
"""Conversations on which revisions of one family differ: tools, thinking off, a turn with and without reasoning."""


def choose_revision(family: TitoFamily, tokenizer: Tokenizer, checkpoint: str | Path | None) -> tuple[Revision, str]:
    """The revision of a checkpoint when none was named, and in words how it was found.

    By the checkpoint's own template, else by its config, else the declared default (logged as a warning).
    """
    default = family.revisions[0]
    if len(family.revisions) == 1:
        return default, "the only one"
    own = load_chat_template(checkpoint) if checkpoint else None
    if own is not None and (found := _by_template(family, own, str(checkpoint))) is not None:
        return found, "by the checkpoint's template"
    for revision in family.revisions:
        if revision.config and all(_config_value(tokenizer.config, k) == v for k, v in revision.config.items()):
            return revision, "by the checkpoint's config"
    log.warning(
        "family %s has the revisions %s, and the checkpoint does not tell which it is: taking %s; name it with "
        "--tito-model %s@REVISION", family.name, ", ".join(r.name for r in family.revisions), default.name, family.name,
    )  # fmt: skip
    return default, "the default"


def _config_value(config: Mapping[str, Any], key: str) -> Any:
    """A config's value; `a.b` looks inside."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _by_template(family: TitoFamily, text: str, checkpoint: str) -> Revision | None:
    """The revision that agrees with the template on most probes; none if no probe at all tells them apart."""
    variables = special_token_variables(checkpoint)
    try:
        own = ChatTemplate(text, source=checkpoint, variables=variables)
    except MilesError:
        return None
    scores = [_score(family, revision, own) for revision in family.revisions]
    best = max(scores)
    if best == 0 or scores.count(best) > 1:
        return None
    return family.revisions[scores.index(best)]


def _score(family: TitoFamily, revision: Revision, own: Renderer) -> int:
    """On how many probes a revision and the checkpoint's template write the same."""
    ours = family.renderer_of(revision)
    if ours is None:
        return 0
    fixed = {**family.fixed_kwargs, **revision.fixed_kwargs}
    agreed = 0
    for messages, tools, kwargs in PROBES:
        ready = normalise_messages(messages, family.content_format)
        texts = [_text(renderer, ready, normalise_tools(tools), {**kwargs, **fixed}) for renderer in (ours, own)]
        agreed += texts[0] is not None and texts[0] == texts[1]
    return agreed


def _text(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[Tool] | None, kwargs: Mapping[str, Any]
) -> str | None:
    try:
        return renderer.render(messages, tools, kwargs, add_generation_prompt=True)
    except MilesError:
        return None
