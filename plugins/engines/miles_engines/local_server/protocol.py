"""What requests may say: their fields, and SGLang's errors for what they may not."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

CONTEXT_RESERVE = 6
"""SGLang refuses inputs that leave less room than this in the context."""

ROLES = ("system", "user", "assistant", "tool", "function", "developer", "latest_reminder", "root")

Body = TypeVar("Body", bound=BaseModel)


class ApiError(Exception):
    """A request that is refused; `kind` is the `type` of OpenAI-style error bodies."""

    def __init__(self, message: str, *, status: int = 400, kind: str = "BadRequestError") -> None:
        super().__init__(message)
        self.message, self.status, self.kind = message, status, kind

    def openai_body(self) -> dict[str, Any]:
        """The body that chat requests get."""
        return {"object": "error", "message": self.message, "type": self.kind, "param": None, "code": self.status}

    def plain_body(self) -> dict[str, Any]:
        """The body that `/generate` and the administration get."""
        return {"error": {"message": self.message}}


class UpdateFailed(ApiError):
    """New weights that are not used; the old ones stay."""

    def plain_body(self) -> dict[str, Any]:
        """The body that SGLang answers a failed update with."""
        return {"success": False, "message": self.message, "num_paused_requests": 0}


class Fields(BaseModel):
    """Base of request bodies: fields that this engine does not know are ignored."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class StreamOptions(Fields):
    """OpenAI's `stream_options`."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class ChatBody(Fields):
    """A chat completion request."""

    messages: list[dict[str, Any]]
    model: str = "default"
    input_ids: list[int] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = False
    no_stop_trim: bool | None = False
    skip_special_tokens: bool | None = True
    n: int | None = 1
    rid: str | list[str] | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    separate_reasoning: bool | None = True
    return_meta_info: bool | None = False
    return_token_ids: bool | None = False
    return_prompt_token_ids: bool | None = False
    return_completion_token_ids: bool | None = False
    return_cached_tokens_details: bool | None = False
    return_input_ids_in_sglext: bool | None = False
    return_output_ids_in_sglext: bool | None = False
    regex: str | None = None
    ebnf: str | None = None
    response_format: dict[str, Any] | None = None


class GenerateParams(Fields):
    """`sampling_params` of a generate request."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    sampling_seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = False
    no_stop_trim: bool | None = False
    skip_special_tokens: bool | None = True
    n: int | None = 1
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | None = None


class GenerateBody(Fields):
    """A generate request: one prompt or a list of them."""

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: GenerateParams | list[GenerateParams] | None = None
    rid: str | list[str] | None = None
    stream: bool | None = False
    return_logprob: bool | None = False
    top_logprobs_num: int | None = 0
    return_text_in_logprobs: bool | None = False


class AbortBody(Fields):
    """Which requests to end: those whose rid begins with `rid`, or all."""

    rid: str | None = None
    abort_all: bool | None = False


class VersionBody(Fields):
    """The weights' new version."""

    new_version: str
    abort_all_requests: bool | None = False


class PauseBody(Fields):
    """How to pause: `abort` ends what runs, `retract` puts it back into the queue, `in_place` holds it as it is."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class UpdateBody(Fields):
    """The directory that has the new weights, and what to call them."""

    model_path: str
    weight_version: str | None = None
    abort_all_requests: bool | None = False
    flush_cache: bool | None = True


class TokenizeBody(Fields):
    """Text to tokenize."""

    prompt: str | list[str]


class DetokenizeBody(Fields):
    """Ids to turn into text."""

    tokens: list[int] | list[list[int]]
    skip_special_tokens: bool | None = True


def read(kind: type[Body], raw: bytes) -> Body:
    """Parse a body; a schema error is 400 in SGLang's words, without its server's paths."""
    try:
        data = orjson.loads(raw or b"{}")
    except ValueError as error:
        text = (
            f"1 validation error:\n  {{'type': 'json_invalid', 'loc': ('body',), 'msg': 'JSON decode error: {error}'}}"
        )
        raise ApiError(text, kind="Bad Request") from error
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise ApiError(_schema_text(error), kind="Bad Request") from error


def _schema_text(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_context=False, include_input=False)
    lines = [{"type": item["type"], "loc": ("body", *item["loc"]), "msg": item["msg"]} for item in found]
    count = f"{len(lines)} validation error{'s' if len(lines) > 1 else ''}"
    return "\n".join([f"{count}:", *(f"  {line}" for line in lines)])


def check_chat(body: ChatBody) -> None:
    """Refuse what the fields' types allow but SGLang does not, or this engine cannot do."""
    if not body.messages:
        raise ApiError("Messages cannot be empty.")
    if body.input_ids is not None and not body.input_ids:
        raise ApiError("input_ids cannot be empty.")
    for index, message in enumerate(body.messages):
        _check_role(index, message)
    if body.tool_choice == "required" and not body.tools:
        raise ApiError("Tools cannot be empty if tool choice is set to required.")
    for name in ("return_meta_info", "return_token_ids", "return_prompt_token_ids"):
        if body.stream and getattr(body, name):
            text = f"{name} is not supported with streaming. Please set stream=false when using {name}=true."
            raise ApiError(text, kind="BadRequest")
    if body.n is not None and body.n < 1:
        raise ApiError(f"n must be at least 1, got {body.n}.")
    format_ = (body.response_format or {}).get("type", "text")
    constrained(regex=body.regex, ebnf=body.ebnf, response_format=None if format_ == "text" else format_)


def constrained(**fields: object) -> None:
    """Refuse constrained decoding, by the field that asks for it."""
    for name, value in fields.items():
        if value is not None:
            raise ApiError(f"{name}: the local engine has no constrained decoding; use --engine sglang for it.")


def _check_role(index: int, message: dict[str, Any]) -> None:
    role = message.get("role")
    if role not in ROLES:
        where = ("body", "messages", index, "role")
        allowed = ", ".join(repr(name) for name in ROLES)
        line = {"type": "value_error", "loc": where, "msg": f"Value error, 'role' must be one of {allowed}."}
        raise ApiError(f"1 validation error:\n  {line}", kind="Bad Request")


def check_length(length: int, max_new_tokens: int | None, context: int) -> int:
    """How many tokens may be generated after a prompt of `length`; SGLang's errors if it does not fit."""
    if length >= context:
        raise ApiError(f"The input ({length} tokens) is longer than the model's context length ({context} tokens).")
    if max_new_tokens is not None and length + max_new_tokens > context:
        raise ApiError(
            f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested "
            f"a total of {length + max_new_tokens} tokens: {length} tokens from the input messages and "
            f"{max_new_tokens} tokens for the completion. Please reduce the number of tokens in the input messages "
            "or the completion to fit within the limit."
        )
    if length >= context - CONTEXT_RESERVE:
        raise ApiError(
            f"Input length ({length} tokens) exceeds the maximum allowed length ({context - CONTEXT_RESERVE} tokens). "
            "Use a shorter input or enable --allow-auto-truncate."
        )
    return context - length if max_new_tokens is None else max_new_tokens


def check_ids(ids: list[int], vocab_size: int) -> None:
    """Refuse ids that the model has no embedding for; SGLang would die of them."""
    for index, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            text = f"input_ids[{index}] is {token}, outside the model's vocabulary of {vocab_size} ids."
            raise ApiError(text)


def check_range(name: str, value: float, fits: bool, allowed: str) -> None:
    """Refuse a sampling parameter in SGLang's words."""
    if not fits or not math.isfinite(value):
        raise ApiError(f"{name} must be {allowed}, got {value}.")
