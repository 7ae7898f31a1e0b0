"""Every family's sessions, with its real tokenizer and a model that says what the family would sample, pass."""

from __future__ import annotations

import dataclasses

import pytest

import real_tokenizers
from miles_core.plugins import Registry
from miles_core.server.parts import load_parts
from miles_core.server.settings import ServerSettings
from miles_core.testing.fake_engine import FakeEngine, Reply, chat_reply, refuses, sampled
from miles_core.testing.verify_session import Options, Verdict, verify_session
from miles_core.testing.verify_session.talk import CUT_AT
from miles_core.tito import BoundFamily
from miles_core.types import Json, Message

pytestmark = pytest.mark.slow

TOKENIZERS = {
    "qwen35": "qwen35",
    "qwennext": "qwen3",
    "glm47@glm-4.7": "glm47",
    "nemotron3@nemotron3": "nemotron3",
    "kimi25": "kimi",
    "kimi26": "kimi",
    "minimax_m25": "minimax",
    "minimax_m27": "minimax",
    "deepseekv32": "deepseekv32",
    "deepseekv4@recipe": "deepseekv4",
    "inkling": "inkling",
}
CALL = ("calculator", '{"expression": "1 + 2"}')


class Willing:
    """Calls the calculator when it is asked, answers when it has a result; thinks where the prompt has it think."""

    def __init__(self, family: BoundFamily) -> None:
        self._family = family

    def __call__(self, body: Json) -> Reply:
        if body.get("regex"):
            return refuses(400, b'{"message": "no regex here"}')
        family = self._family
        prompt = body.get("input_ids") or self._rendered(body)
        number = sum(len(message.get("tool_calls") or ()) for message in body["messages"])
        ids, finish = self._ids(body, prompt, number), None
        if body["max_tokens"] <= CUT_AT:
            ids, finish = ids[: body["max_tokens"]], "length"
        parser = family.parser(body.get("tools"), prompt_ids=prompt)
        parser.feed(ids)
        parser.finish()
        message = parser.message()
        calls = [CALL for _ in message.get("tool_calls") or ()]
        reply = chat_reply(
            ids, message["content"] or "", reasoning=message.get("reasoning_content") or "", calls=calls,
            finish=finish, prompt=len(prompt),
        )  # fmt: skip

        def complete(answer: Json) -> None:
            answer["choices"][0]["prompt_token_ids"] = prompt
            for at, call in enumerate(answer["choices"][0]["message"]["tool_calls"] or ()):
                call["id"] = f"functions.calculator:{number + at}"

        return reply.with_json(complete)

    def _rendered(self, body: Json) -> list[int]:
        kwargs = self._family.merge_kwargs(body.get("chat_template_kwargs"))
        return self._family.encode(self._family.render(body["messages"], body.get("tools"), kwargs))

    def _ids(self, body: Json, prompt: list[int], number: int) -> list[int]:
        message: Message = {"role": "assistant", "content": "The answer is 3."}
        if body["messages"][-1]["role"] == "user":
            name, arguments = CALL
            function = {"name": name, "arguments": arguments}
            call = {"id": f"functions.calculator:{number}", "type": "function", "function": function}
            message = {"role": "assistant", "content": "", "tool_calls": [call]}
        if self._thinks(prompt):
            message["reasoning_content"] = "Well."
        return sampled(self._family, message)

    def _thinks(self, prompt: list[int]) -> bool:
        """Whether the prompt has opened a reasoning."""
        tags = self._family.parse_facts.reasoning
        return tags is not None and self._family.tokenizer.decode(prompt[-8:]).rstrip().endswith(tags[0])


@pytest.mark.parametrize("selector", TOKENIZERS)
def test_a_family_passes(selector: str) -> None:
    checkpoint = str(real_tokenizers.checkpoint(TOKENIZERS[selector]))
    settings = ServerSettings(checkpoint=checkpoint, tito_model=selector, engine_urls=(), history="tree")
    parts = load_parts(settings, Registry.discover())
    engine = FakeEngine(parts.family, always=Willing(parts.family))
    engine.start()
    try:
        here = dataclasses.replace(settings, engine_urls=(engine.url,))
        found = verify_session(here, Options(cycles=1), parts=parts)
    finally:
        engine.stop()
    assert found.failures == ()
    assert (found.verdict, found.missing) == (Verdict.PASS, ())
    for role in parts.family.family.allowed_append_roles:
        assert any(event.name == f"append {role}" and event.count for event in found.events)
