"""Messages to text: input normalisation, and Jinja chat templates as checkpoints expect them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Literal, NoReturn, Protocol

import jinja2
import jinja2.ext
import jinja2.sandbox

from miles_core.errors import RenderError
from miles_core.types import Message, Tool

ContentFormat = Literal["string", "parts"]
"""Whether a family's template takes content as text only, or writes lists of parts itself."""

MEDIA_PARTS = frozenset(
    {"image", "image_url", "input_image", "audio", "audio_url", "input_audio", "video", "video_url", "input_video"}
)


def normalise_messages(
    messages: Sequence[Mapping[str, Any]], content_format: ContentFormat = "string", *, first: int = 0
) -> list[Message]:
    """Messages as templates want them; the input is not changed.

    Missing or null content becomes `""`; lists of text parts become text (tool messages, and every role
    where the template takes strings: joined by one space); tool-call arguments that spell a JSON object
    become that object, other arguments stay the text they are. Raises RenderError naming the message;
    `first` is the index of the first one in the conversation.
    """
    return [_normalise(index, message, content_format) for index, message in enumerate(messages, first)]


def _normalise(index: int, message: Mapping[str, Any], content_format: ContentFormat) -> Message:
    if not isinstance(message, Mapping):
        raise RenderError(f"messages[{index}] is {_kind(message)}, expected an object with a role")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RenderError(f"messages[{index}] has no role (found {shown(role)})")
    out = dict(message)
    out["content"] = _content(index, role, message.get("content"), content_format)
    reasoning = message.get("reasoning_content")
    if reasoning is None:
        out.pop("reasoning_content", None)
    elif not isinstance(reasoning, str):
        raise RenderError(f"messages[{index}].reasoning_content is {_kind(reasoning)}, expected a string")
    if message.get("tool_calls"):
        out["tool_calls"] = _calls(index, message["tool_calls"])
    else:
        out.pop("tool_calls", None)
    return out


def _content(index: int, role: str, content: Any, content_format: ContentFormat) -> Any:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RenderError(f"messages[{index}].content is {_kind(content)}, expected a string or a list of parts")
    texts = [_part_text(index, number, part) for number, part in enumerate(content)]
    if role == "tool" or content_format == "string" or len(texts) <= 1:
        return " ".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _part_text(index: int, number: int, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and kind in ("text", "input_text", None) and isinstance(part.get("text"), str):
        return str(part["text"])
    where = f"messages[{index}].content[{number}]"
    if isinstance(kind, str) and kind in MEDIA_PARTS:
        raise RenderError(
            f"{where} is a part of type {shown(kind)}, and this family's sessions are text only; "
            "use a generate function (--generate) for multimodal prompts"
        )
    raise RenderError(f"{where} is {_kind(part)} of type {shown(kind)}, expected {{'type': 'text', 'text': …}}")


def _calls(index: int, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RenderError(f"messages[{index}].tool_calls is {_kind(calls)}, expected a list")
    out = []
    for number, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RenderError(f"messages[{index}].tool_calls[{number}] has no function name")
        out.append({**call, "function": {**function, "arguments": parse_arguments(function.get("arguments"))}})
    return out


def parse_arguments(arguments: Any) -> dict[str, Any] | str:
    """Tool-call arguments as an object if they are one, else the text they are; missing is the empty object."""
    if arguments is None:
        return {}
    if isinstance(arguments, dict):
        return arguments
    if not isinstance(arguments, str):
        return _json_text(arguments)
    try:
        value = json.loads(arguments, parse_constant=_refuse_constant, parse_float=_finite)
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _json_text(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (RecursionError, ValueError, TypeError) as error:
        raise RenderError(f"arguments of a tool call cannot be written as JSON: {error}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is out of range")
    return value


def normalise_tools(tools: Any) -> list[Tool] | None:
    """Tools as templates want them: None if there are none; a bare function is wrapped; nothing else changes.

    Raises RenderError naming the entry that is not an object.
    """
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise RenderError(f"tools is {_kind(tools)}, expected a list")
    out = []
    for number, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise RenderError(f"tools[{number}] is {_kind(tool)}, expected an object")
        if "function" not in tool and isinstance(tool.get("name"), str) and tool.get("type") in (None, "function"):
            bare = {k: v for k, v in tool.items() if k != "type"}
            tool = {"type": "function", "function": bare}
        out.append(tool)
    return out


def shown(value: Any) -> str:
    """A value as messages quote it, not longer than a line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer longer than Python spells, nesting deeper than its stack
        return _kind(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    return names.get(type(value), "a list" if isinstance(value, list) else "an object")


class Renderer(Protocol):
    """Messages to text: a compiled template, or an encoder in Python where a family has no template."""

    @property
    def source(self) -> str:
        """Where it comes from, for messages."""
        ...

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        kwargs: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The text of a conversation whose input is normalised. Raises RenderError for what it cannot carry."""
        ...


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`, which training templates carry: renders what is inside."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment(kind: type[jinja2.Environment]) -> jinja2.Environment:
    environment = kind(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
        autoescape=False,
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _Environment(jinja2.Environment):
    """Jinja's, which looks a message's key up before it fails to find an attribute of that name: most are keys."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As Jinja's, in a third of the time for keys of dicts."""
        if type(obj) is dict and attribute in obj and attribute not in _DICTS_OWN:
            return obj[attribute]
        return super().getattr(obj, attribute)


_DICTS_OWN = frozenset(dir(dict))
"""Names that mean the attribute, not the key."""


@lru_cache(maxsize=32)
def _compiled(text: str, trusted: bool) -> jinja2.Template:
    """The template, compiled once: choosing a revision and looking for a changed template read the same ones."""
    return _environment(_Environment if trusted else jinja2.sandbox.ImmutableSandboxedEnvironment).from_string(text)


class ChatTemplate:
    """A compiled Jinja chat template, with the filters and functions that checkpoints rely on.

    Raises RenderError at construction if it does not compile; `source` names it in messages. A `trusted` template came
    with installed code: it runs outside Jinja's sandbox, which doubles the time of a short render.
    """

    def __init__(
        self, text: str, *, source: str, variables: Mapping[str, str] | None = None, trusted: bool = False
    ) -> None:
        self.text = text
        self.source = source
        self.timeless = "strftime_now" not in text
        """Whether it always writes the same for the same input."""
        self._variables = dict(variables or {})
        try:
            self._template = _compiled(text, trusted)
        except Exception as error:  # Jinja writes Python of it, whose compiler has refusals of its own
            raise RenderError(f"the chat template {source} does not compile: {_reason(error)}", status=500) from error

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        kwargs: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The text of a conversation. Raises RenderError with the template's own reason."""
        ours = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render({"documents": None, **self._variables, **kwargs, **ours})
        except jinja2.TemplateError as error:
            raise RenderError(f"the chat template {self.source} refused the messages: {error}") from error
        except Exception as error:  # a template calls methods of Python's values, which may raise anything
            raise RenderError(f"the chat template {self.source} failed on these messages: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Why a template does not compile or render; Jinja's own reasons say enough without the name of their class."""
    return str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"


def written(
    renderer: Renderer,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    kwargs: Mapping[str, Any],
    *,
    add_generation_prompt: bool,
) -> str:
    """What a renderer writes. Raises RenderError for values that are JSON and still cannot be written as JSON.

    Those are nesting deeper than Python's stack and integers longer than Python spells: an encoder in Python need not
    look out for them.
    """
    try:
        return renderer.render(messages, tools, kwargs, add_generation_prompt=add_generation_prompt)
    except (RecursionError, ValueError, OverflowError) as error:
        raise RenderError(f"{renderer.source} cannot write these messages: {type(error).__name__}: {error}") from error
