"""Probe conversations, and how a family's rendering of them compares with a template.

One place says which conversations are tried, and what a template writes for them: the choice of a revision, the
detection of a family and the check for a changed template all count from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from miles_core.errors import MilesError
from miles_core.tito.render import normalise_messages, normalise_tools
from miles_core.types import Message, Tool

if TYPE_CHECKING:
    from miles_core.tito.family import Revision, TitoFamily
    from miles_core.tito.render import Renderer

THINKING: Mapping[bool, Mapping[str, Any]] = {on: {"enable_thinking": on, "thinking": on} for on in (True, False)}
"""Thinking on and off under the names that templates know; a template ignores the name that it does not."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One conversation, rendered with the generation prompt.

    `kwargs` are what a request would say of thinking. `first_turn` says that the model has not answered yet.
    `rewritten` says that a checkpoint's template may honestly differ from an append-only one here: it drops, or
    leaves out, reasoning of earlier turns.
    """

    name: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=lambda: THINKING[True])
    first_turn: bool = False
    rewritten: bool = False


def _tool(name: str, description: str, properties: Mapping[str, Any], *required: str, **more: Any) -> Tool:
    parameters = {"type": "object", "properties": dict(properties), "required": list(required), **more}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _call(number: int, name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": f"functions.{name}:{number}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _result(number: int, name: str, text: str) -> Message:
    return {"role": "tool", "tool_call_id": f"functions.{name}:{number}", "content": text}


_WEIGH = _tool("weigh", "Weigh a parcel.", {"parcel": {"type": "string", "description": "Its label"}}, "parcel")
_SHIP = _tool(
    "ship",
    'Send « parcels » off.\nSay "where" & <how>: 郵便 📦',
    {
        "to": {"type": "string", "enum": ["north", "south"]},
        "parcels": {"type": "array", "items": {"type": "object", "properties": {"label": {"type": "string"}}}},
        "days": {"type": "integer", "default": 1, "minimum": 0},
        "insured": {"type": ["boolean", "null"]},
    },
    "to",
    "parcels",
    additionalProperties=False,
)
_ASK: Message = {"role": "user", "content": "How heavy is A 1?"}
_AGAIN: Message = {"role": "user", "content": "And B 2?"}
_SYSTEM: Message = {"role": "system", "content": "Be brief."}
_ANSWER: Message = {"role": "assistant", "content": "Heavy."}
_WEIGHING: Message = {
    "role": "assistant",
    "content": "One moment.",
    "reasoning_content": "weigh it first",
    "tool_calls": [_call(0, "weigh", '{"parcel": "A 1"}')],
}
_SHIPPING: Message = {
    "role": "assistant",
    "content": "Both at once.",
    "reasoning_content": "two calls",
    "tool_calls": [
        _call(0, "weigh", '{"parcel": "B 2"}'),
        _call(
            1, "ship", '{"to": "north", "parcels": [{"label": "é \\"1\\""}], "days": 2, "insured": true, "more": null}'
        ),
    ],
}
_WEIGHED = _result(0, "weigh", "3 kg")


def _without(message: Message, *keys: str) -> Message:
    return {key: value for key, value in message.items() if key not in keys}


PROBES: tuple[Probe, ...] = (
    Probe(name="question", messages=(_ASK,), kwargs={}, first_turn=True),
    Probe(name="thinking-on", messages=(_ASK,), first_turn=True),
    Probe(name="thinking-off", messages=(_ASK,), kwargs=THINKING[False], first_turn=True),
    Probe(name="system", messages=(_SYSTEM, _ASK), first_turn=True),
    Probe(
        name="spaces",
        messages=({"role": "system", "content": "  Be brief.  \n"}, {"role": "user", "content": "Où ? 東京 🌊 — ½"}),
        tools=(_WEIGH,),
        first_turn=True,
    ),
    Probe(name="tool", messages=(_ASK,), tools=(_WEIGH,), first_turn=True),
    Probe(name="tools-system", messages=(_SYSTEM, _ASK), tools=(_WEIGH, _SHIP), first_turn=True),
    Probe(name="call", messages=(_ASK, _WEIGHING, _WEIGHED), tools=(_WEIGH,)),
    Probe(
        name="parallel-calls",
        messages=(_SYSTEM, _ASK, _SHIPPING, _WEIGHED, _result(1, "ship", "")),
        tools=(_WEIGH, _SHIP),
    ),
    Probe(name="call-thinking-off", messages=(_ASK, _WEIGHING, _WEIGHED), tools=(_WEIGH,), kwargs=THINKING[False]),
    Probe(name="call-alone", messages=(_ASK, {**_WEIGHING, "content": ""}, _WEIGHED), tools=(_WEIGH,), rewritten=True),
    Probe(
        name="call-plain",
        messages=(_ASK, _without(_WEIGHING, "reasoning_content"), _WEIGHED),
        tools=(_WEIGH,),
        rewritten=True,
    ),
    Probe(
        name="call-reasoning-key",
        messages=(_ASK, {**_without(_WEIGHING, "reasoning_content"), "reasoning": "weigh it first"}, _WEIGHED),
        tools=(_WEIGH,),
        rewritten=True,
    ),
    Probe(name="answer-plain", messages=(_ASK, _ANSWER, _AGAIN), rewritten=True),
    Probe(
        name="answer-reasoned",
        messages=(_ASK, {**_ANSWER, "reasoning_content": "it is a crate"}, _AGAIN),
        rewritten=True,
    ),
    Probe(name="call-user", messages=(_ASK, _WEIGHING, _WEIGHED, _AGAIN), tools=(_WEIGH,), rewritten=True),
)
"""Conversations on which formats differ: tools, thinking, white space, calls, turns with and without reasoning."""


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """How a family (`expected`) and a template (`actual`) write one probe.

    A text is None where that side refused the conversation; `error` then says who and why. Both refusing agrees.
    """

    probe: Probe
    agrees: bool
    expected: str | None
    actual: str | None
    error: str | None = None

    @property
    def name(self) -> str:
        """The probe's name."""
        return self.probe.name

    @property
    def first_turn(self) -> bool:
        """Whether the model has not answered yet."""
        return self.probe.first_turn


def compare_with_template(
    family: TitoFamily, revision: Revision, template: Renderer, probes: Sequence[Probe] = PROBES
) -> list[ProbeResult]:
    """How a revision and a template write the probes; the family's fixed kwargs go to both.

    Empty where the revision brings no rendering of its own, so that there is nothing to compare.
    """
    ours = family.renderer_of(revision)
    if ours is None:
        return []
    fixed = {**family.fixed_kwargs, **revision.fixed_kwargs}
    return [_compare(family, ours, template, probe, {**probe.kwargs, **fixed}) for probe in probes]


def _compare(
    family: TitoFamily, ours: Renderer, template: Renderer, probe: Probe, kwargs: Mapping[str, Any]
) -> ProbeResult:
    messages = normalise_messages(probe.messages, family.content_format)
    tools = normalise_tools(list(probe.tools))
    expected, refusal = _text(ours, messages, tools, kwargs)
    extra = family.template_variables(tools) if family.template_variables and tools else {}
    actual, error = _text(template, messages, tools, {**kwargs, **extra})
    return ProbeResult(probe=probe, agrees=expected == actual, expected=expected, actual=actual, error=refusal or error)


def _text(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[Tool] | None, kwargs: Mapping[str, Any]
) -> tuple[str | None, str | None]:
    try:
        return renderer.render(messages, tools, kwargs, add_generation_prompt=True), None
    except MilesError as error:
        return None, error.message
    except Exception as error:  # a template or an encoder of somebody else's may raise anything
        return None, f"{renderer.source} failed: {type(error).__name__}: {error}"


@dataclass(frozen=True)
class Difference:
    """Where two texts part: the index, and from a little before it what each of them has."""

    index: int
    expected: str
    actual: str


def first_difference(expected: str, actual: str, *, before: int = 20, after: int = 40) -> Difference | None:
    """The first place where two texts differ, with some context; None if they are equal."""
    if expected == actual:
        return None
    pairs = zip(expected, actual, strict=False)
    index = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(actual)))
    start = max(0, index - before)
    return Difference(index, expected[start : index + after], actual[start : index + after])
