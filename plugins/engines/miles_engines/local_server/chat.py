"""`/v1/chat/completions` answered as a whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from miles_core.errors import RenderError, RequestError
from miles_core.types import Message, Tool
from miles_engines.local_server import params, replies
from miles_engines.local_server.chat_format import ChatFormat, MessageBuilder
from miles_engines.local_server.job import Finish, Job
from miles_engines.local_server.protocol import ApiError, ChatBody, check_chat
from miles_engines.local_server.service import Service


@dataclass(frozen=True)
class Chat:
    """A checked chat request with the jobs that answer it, one per choice."""

    body: ChatBody
    jobs: Sequence[Job]
    tools: Sequence[Tool] | None
    created: int

    @property
    def id(self) -> str:
        """The answer's id: the first job's rid."""
        return self.jobs[0].rid

    @property
    def logprobs(self) -> bool:
        """Whether log-probabilities were asked for."""
        return bool(self.body.logprobs)

    def builder(self, format_: ChatFormat) -> MessageBuilder:
        """A parser for one choice, as the request wants it."""
        reasoning = self.body.separate_reasoning is not False
        return format_.parser(self.jobs[0].prompt, self.tools, calls=bool(self.tools), reasoning=reasoning)


def open_chat(service: Service, body: ChatBody) -> Chat:
    """Check a request and make its jobs; ApiError says what is wrong."""
    check_chat(body)
    tools = _tools(body)
    limit = params.chat_limit(body, service.model.context_length)
    prompt = list(body.input_ids) if body.input_ids is not None else _prompt(service.format, body, tools)
    room = service.room(prompt, limit)
    sampling = params.for_chat(body, room, service.model.generation_defaults)
    rids = service.rids(body.rid, body.n or 1)
    live = bool(body.stream)
    jobs = [service.job(rid, prompt, params.choice(sampling, index), live=live) for index, rid in enumerate(rids)]
    return Chat(body, jobs, tools, int(time.time()))


def _tools(body: ChatBody) -> Sequence[Tool] | None:
    """The tools in effect: none if the choice is none, the named one if it names one."""
    if not body.tools or body.tool_choice == "none":
        return None
    if isinstance(body.tool_choice, dict):
        name = (body.tool_choice.get("function") or {}).get("name")
        return [tool for tool in body.tools if (tool.get("function") or {}).get("name") == name] or None
    return body.tools


def _prompt(format_: ChatFormat, body: ChatBody, tools: Sequence[Tool] | None) -> list[int]:
    try:
        return format_.prompt(body.messages, tools, format_.kwargs(body.chat_template_kwargs, body.reasoning_effort))
    except (RenderError, RequestError) as error:
        raise ApiError(error.message) from error


async def answer(service: Service, chat: Chat) -> dict[str, Any]:
    """Run the request to its end and build the whole answer."""
    async with service.running(chat.jobs):
        finishes = await asyncio.gather(*(job.result() for job in chat.jobs))
    choices, reasoning = [], 0
    for index, (job, finish) in enumerate(zip(chat.jobs, finishes, strict=True)):
        replies.raise_failed(finish)
        builder = chat.builder(service.format)
        builder.feed(replies.shown_ids(job))
        builder.finish()
        choices.append(_choice(service, chat, index, builder))
        reasoning += service.format.reasoning_tokens(job.output_ids, choices[-1]["message"])
    version = service.scheduler.weight_version
    segments = replies.version_segments(chat.jobs[0], version)
    reply: dict[str, Any] = {
        "id": chat.id,
        "object": "chat.completion",
        "created": chat.created,
        "model": chat.body.model,
        "choices": choices,
        "usage": replies.usage(chat.jobs, reasoning),
        "metadata": {"weight_version": segments[-1]["version"], "weight_versions": segments},
    }
    extension = sglext(chat)
    return reply | {"sglext": extension} if extension else reply


def final_reason(finish: Finish, builder: MessageBuilder) -> Finish:
    """A generation that ended by itself after a whole tool call ended for `tool_calls`."""
    return {"type": "tool_calls", "matched": None} if finish["type"] == "stop" and builder.called else finish


def _choice(service: Service, chat: Chat, index: int, builder: MessageBuilder) -> dict[str, Any]:
    job, text = chat.jobs[index], service.format.token_text
    assert job.finish is not None  # `answer` has waited for it
    reason = final_reason(job.finish, builder)
    count = len(job.output_ids)
    message: Message = builder.message()
    reasoning = service.format.reasoning_tokens(job.output_ids, message)
    choice: dict[str, Any] = {
        "index": index,
        "message": message,
        "logprobs": replies.openai_logprobs(job, 0, count, text) if chat.logprobs else None,
        "finish_reason": reason["type"],
        "matched_stop": reason.get("matched"),
    }
    if chat.body.return_token_ids or chat.body.return_prompt_token_ids:
        choice["prompt_token_ids"] = job.prompt
    if chat.body.return_token_ids or chat.body.return_completion_token_ids:
        choice["response_token_ids"] = job.output_ids
    if chat.body.return_meta_info:
        version = service.scheduler.weight_version
        choice["meta_info"] = replies.meta_info(
            job, reason, count, version, logprobs=chat.logprobs, text=text, reasoning=reasoning
        )
    return choice


def sglext(chat: Chat) -> dict[str, Any]:
    """SGLang's extension of an answer, or of a stream's last chunks: what was asked for of it."""
    extension: dict[str, Any] = {}
    if chat.body.return_cached_tokens_details:
        extension["cached_tokens_details"] = replies.cached_details(chat.jobs[0])
    if chat.body.return_input_ids_in_sglext:
        extension["input_ids"] = chat.jobs[0].prompt
    if chat.body.return_output_ids_in_sglext:
        extension["output_ids"] = [job.output_ids for job in chat.jobs]
    return extension
