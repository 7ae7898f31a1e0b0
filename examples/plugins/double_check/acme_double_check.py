"""An agent that asks, and then asks whether that is right; the reward is that of its last answer."""

from __future__ import annotations

import re
from typing import Any

import aiohttp

from miles_core import Message

QUESTION = "Is that right? Answer again."
NUMBER = re.compile(r"-?\d+")


async def run_agent(
    base_url: str, prompt: list[Message], request_kwargs: dict[str, Any], metadata: dict[str, Any]
) -> dict[str, Any]:
    """Two turns: the task's, and the second thought."""
    key = metadata.get("session_api_key")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answers: list[Message] = []
    async with aiohttp.ClientSession(headers=headers) as http:
        messages = list(prompt)
        for question in (None, QUESTION):
            if question is not None:
                messages.append({"role": "user", "content": question})
            body = {"model": "default", "messages": messages, **request_kwargs}
            async with http.post(f"{base_url}/v1/chat/completions", json=body) as response:
                response.raise_for_status()
                answers.append((await response.json())["choices"][0]["message"])
            messages.append(answers[-1])
    first, last = (_right(answer, metadata.get("label")) for answer in answers)
    return {"reward": float(last), "changed_its_mind": first != last}


def _right(answer: Message, label: object) -> bool:
    numbers = NUMBER.findall(answer.get("content") or "")
    return bool(numbers) and numbers[-1] == str(label)
