"""`/v1/chat/completions` as a stream of events: chunks as tokens are sampled, as SGLang with parsers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from miles_engines.local_server import replies
from miles_engines.local_server.chat import Chat, final_reason, sglext
from miles_engines.local_server.job import Finish, Job
from miles_engines.local_server.service import Service
from miles_engines.local_server.stops import StopGate, StopStrings

Event = dict[str, Any]


class _Choice:
    """One choice being streamed: which of its tokens are out, and what its parser holds back."""

    def __init__(self, service: Service, chat: Chat, index: int) -> None:
        self._chat, self._index, self._format = chat, index, service.format
        self._job: Job = chat.jobs[index]
        self._gate = StopGate(StopStrings() if self._job.params.no_stop_trim else self._job.stops)
        self.builder = chat.builder(service.format)
        self._sent = 0

    def first(self) -> Event:
        """The chunk that opens the choice."""
        return self._chunk({"role": "assistant", "content": ""})

    def news(self, count: int, finish: Finish | None) -> list[Event]:
        """Chunks for the tokens sampled since last time; log-probs go with the first of them."""
        job, start = self._job, self._sent
        self._sent = count
        deltas = self._deltas(job.output_ids[start:count], finish)
        logprobs = None
        if self._chat.logprobs and count > start:
            logprobs = replies.openai_logprobs(job, start, count, self._format.token_text)
            deltas = deltas or [{}]
        chunks = [self._chunk(delta, logprobs if not place else None) for place, delta in enumerate(deltas)]
        if finish is not None:
            reason = final_reason(finish, self.builder)
            chunks.append(self._chunk({}, None, reason["type"], reason.get("matched")))
        return chunks

    def reasoning_tokens(self) -> int:
        """How many of the tokens are reasoning."""
        return self._format.reasoning_tokens(self._job.output_ids, self.builder.message())

    def _deltas(self, new: list[int], finish: Finish | None) -> list[dict[str, Any]]:
        if finish is None:
            return self.builder.feed(self._gate.feed(new))
        matched = None if self._job.params.no_stop_trim else finish.get("matched")
        if isinstance(matched, int) and new and new[-1] == matched:
            new = new[:-1]
        return self.builder.feed(self._gate.finish(new, matched)) + self.builder.finish()

    def _chunk(
        self, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None, matched: object = None
    ) -> Event:
        choice = {
            "index": self._index,
            "delta": {"reasoning_content": None, **delta},
            "logprobs": logprobs,
            "finish_reason": reason,
            "matched_stop": matched,
        }
        return envelope(self._chat, [choice])


def envelope(chat: Chat, choices: list[dict[str, Any]], **more: Any) -> Event:
    """A chunk around its choices."""
    head = {"id": chat.id, "object": "chat.completion.chunk", "created": chat.created, "model": chat.body.model}
    return {**head, "choices": choices, **more}


async def events(service: Service, chat: Chat) -> AsyncIterator[Event]:
    """Every chunk of the answer, up to `[DONE]`. Run it inside `service.running`."""
    choices = [_Choice(service, chat, index) for index in range(len(chat.jobs))]
    for choice in choices:
        yield choice.first()
    async for index, count, finish in _progress(chat):
        if finish is not None:
            replies.raise_failed(finish)
        for chunk in choices[index].news(count, finish):
            yield chunk
    extension = sglext(chat)
    if extension:
        yield envelope(chat, [], usage=None, sglext=extension)
    if chat.body.stream_options and chat.body.stream_options.include_usage:
        reasoning = sum(choice.reasoning_tokens() for choice in choices)
        yield envelope(chat, [], usage=replies.usage(chat.jobs, reasoning))


async def _progress(chat: Chat) -> AsyncIterator[tuple[int, int, Finish | None]]:
    """Which choice has how many tokens, as they come; ends when all have finished."""
    if len(chat.jobs) == 1:
        finish: Finish | None = None
        while finish is None:
            count, finish = await chat.jobs[0].wait()
            yield 0, count, finish
        return
    waiting = {asyncio.ensure_future(job.wait()): index for index, job in enumerate(chat.jobs)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = waiting.pop(task)
                count, finish = task.result()
                if finish is None:
                    waiting[asyncio.ensure_future(chat.jobs[index].wait())] = index
                yield index, count, finish
    finally:
        for task in waiting:
            task.cancel()
