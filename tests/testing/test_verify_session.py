"""Verification of sessions against engines that are right, and against families and engines that are not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from helpers.chat_tokenizer import chat_family, decode, encode, write_checkpoint
from helpers.fake_engine import FakeEngine, Json, Reply, refuses, says
from miles_core.errors import ConfigError, EngineUnreachable
from miles_core.plugins import Registry
from miles_core.server.parts import Parts, load_parts
from miles_core.server.settings import ServerSettings
from miles_core.session.wire import SamplesReply
from miles_core.testing.verify_session import Check, Options, SessionVerification, Verdict, verify_session
from miles_core.testing.verify_session.client import SessionClient
from miles_core.testing.verify_session.forcing import forcing_of, regex_of
from miles_core.testing.verify_session.talk import CUT_AT
from miles_core.tito import BoundFamily, ChatTemplate

pytestmark = pytest.mark.slow

CALL = ("calculator", '{"expression": "1 + 2"}')
Change = Callable[[Json, Json], None]
"""Changes an answer in place; it sees the request."""


def rendered(body: Json) -> list[int]:
    """What the engine makes of messages that come without ids."""
    family = chat_family()
    kwargs = family.merge_kwargs(body.get("chat_template_kwargs"))
    return family.encode(family.render(body["messages"], body.get("tools"), kwargs))


class Model:
    """Answers as an engine with a willing model: a question is a call, a result is an answer, a regex is obeyed."""

    def __init__(self) -> None:
        self.calls = True
        self.tells = True
        self.obeys = False
        self.change: Change | None = None

    def __call__(self, body: Json) -> Reply:
        if body.get("regex") and not self.obeys:
            return refuses(400, b'{"message": "no regex here"}')
        prompt = body.get("input_ids") or rendered(body)
        reply = self._says(body, len(prompt))

        def complete(answer: Json) -> None:
            if self.tells and body.get("return_prompt_token_ids"):
                answer["choices"][0]["prompt_token_ids"] = prompt
            if self.change is not None:
                self.change(body, answer)

        return reply.with_json(complete)

    def _says(self, body: Json, prompt: int) -> Reply:
        if body["max_tokens"] <= CUT_AT:
            ids = encode("<think>\nOne two three four five")[: body["max_tokens"]]
            return says(ids=ids, content="", reasoning="One two"[:1], finish="length", prompt=prompt)
        regex = body.get("regex") or ""
        if "violet" in regex:
            return says("violet", reasoning="", ids=[*encode("violet"), encode("<|im_end|>")[0]], prompt=prompt)
        if regex:
            count = regex.count("calculator")
            text = "" if count else "Ten green bottles"
            ids = forced_ids(text, count)
            return says(text, reasoning="", calls=[CALL] * count, ids=ids, prompt=prompt)
        if self.calls and body["messages"][-1]["role"] == "user":
            return says("", calls=[CALL], prompt=prompt)
        return says("The answer is 3.", prompt=prompt)


def forced_ids(text: str, count: int) -> list[int]:
    """Ids of a forced answer, a letter each where a tokenizer would write words."""
    name, arguments = CALL
    calls = "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for _ in range(count)
    )
    return [token for char in text + calls for token in encode(char)] + encode("<|im_end|>")


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def engine(model: Model) -> Iterator[FakeEngine]:
    found = FakeEngine(always=model)
    found.start()
    yield found
    found.stop()


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> ServerSettings:
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    return ServerSettings(checkpoint=str(checkpoint), tito_model="qwen3", engine_urls=(), history="tree")


@pytest.fixture(scope="module")
def parts(settings: ServerSettings) -> Parts:
    return load_parts(settings, Registry.discover())


@pytest.fixture
def verified(engine: FakeEngine, settings: ServerSettings, parts: Parts) -> Callable[..., SessionVerification]:
    """Verifies the engine, by default with one cycle."""

    def run(parts: Parts = parts, **options: Any) -> SessionVerification:
        here = dataclasses.replace(settings, engine_urls=(engine.url,))
        return verify_session(here, Options(**{"cycles": 1, **options}), parts=parts)

    return run


def texts(found: SessionVerification, check: Check) -> str:
    return "\n".join(failure.text for failure in found.failed(check))


Verified = Callable[..., SessionVerification]


# -- engines that are right ----------------------------------------------------------------------------------


def test_an_engine_that_takes_no_regex(verified: Verified) -> None:
    found = verified(cycles=2)
    assert (found.verdict, found.failures, found.missing) == (Verdict.PASS, (), ())
    assert found.histories == ("linear", "tree")
    assert found.engine.forced is False
    assert found.engine.why_not == "the engine refuses regex with 400: no regex here"
    assert {check for check, passed in found.passed.items() if passed} == set(Check)
    counts = {(event.history, event.name): event.count for event in found.events}
    for history in found.histories:
        for name in ("append tool", "append user", "append system", "append assistant", "tool call", "retry"):
            assert counts[history, name] >= 2, (history, name)
        assert counts[history, "parallel calls"] == 0
        assert counts[history, "re-sent history"] == 2
        assert counts[history, "branches"] == 6
    assert counts["linear", "on after a cut"] == counts["tree", "refused after a cut"] == 2
    # with a system message and without
    assert found.rendering.asked == found.rendering.told_ids == 2
    assert (found.assistant_text.counted > 50, found.assistant_text.differing) == (True, 0)


def test_answers_are_forced_where_the_engine_takes_a_regex(
    model: Model, engine: FakeEngine, verified: Verified
) -> None:
    model.obeys, model.calls = True, False
    found = verified()
    assert (found.verdict, found.missing, found.engine.forced) == (Verdict.PASS, (), True)
    counts = {(event.history, event.name): event.count for event in found.events}
    assert counts["linear", "parallel calls"] >= 1
    # letters are tokens: none of it is canonical, and what was forced does not count against the model
    assert found.assistant_text.differing == 0
    assert found.assistant_text.left_out > 30
    assert found.assistant_text.left_out_differing > 20
    quiet = [turn for turn in engine.turns if turn.get("regex") and turn.get("input_ids")]
    assert all(turn["chat_template_kwargs"] == {"enable_thinking": False} for turn in quiet)
    assert any(turn.get("stream") or turn.get("input_ids") for turn in engine.turns)


def test_one_kind_of_history(verified: Verified) -> None:
    found = verified(histories=("tree",))
    assert found.verdict is Verdict.PASS
    assert {event.history for event in found.events} == {"tree"}


# -- what did not happen -------------------------------------------------------------------------------------


def test_a_model_that_never_calls_is_incomplete(model: Model, verified: Verified) -> None:
    model.calls = False
    found = verified()
    assert (found.verdict, found.failures) == (Verdict.INCOMPLETE, ())
    missing = {(event.history, event.name): event.why for event in found.missing}
    assert "no turn of 4 was a tool call; the last ended with stop" in str(missing["linear", "tool call"])
    assert ("tree", "append tool") in missing


def test_an_engine_without_a_tool_call_parser(model: Model, verified: Verified) -> None:
    def change(body: Json, answer: Json) -> None:
        message = answer["choices"][0]["message"]
        if "input_ids" in body and message["tool_calls"]:
            message.update(content=decode(ids_of(answer["choices"][0])[:-1]), tool_calls=None, reasoning_content=None)
            answer["choices"][0]["finish_reason"] = "stop"

    model.change = change
    found = verified(histories=("linear",))
    assert found.verdict is not Verdict.PASS
    missing = {event.name: event.why for event in found.missing}
    assert "is the engine's tool-call parser the family's?" in str(missing["tool call"])


def test_an_engine_that_does_not_tell_its_prompt(model: Model, verified: Verified) -> None:
    model.tells = False
    found = verified()
    assert (found.verdict, found.failures) == (Verdict.INCOMPLETE, ())
    assert found.rendering.told_ids == 0
    # the fake engine tells a number, and it is ours
    assert found.rendering.told_count == found.rendering.asked > 0
    assert verified(allow_unverified_rendering=True).verdict is Verdict.PASS


# -- engines at fault ----------------------------------------------------------------------------------------


def test_an_engine_that_renders_otherwise(model: Model, verified: Verified) -> None:
    def change(body: Json, answer: Json) -> None:
        if "input_ids" not in body:
            answer["choices"][0]["prompt_token_ids"] = encode("<|im_start|>system\nYou help.<|im_end|>\n")

    model.change = change
    found = verified()
    assert found.verdict is Verdict.FAIL
    assert "the engine renders the first turn otherwise: token " in texts(found, Check.RENDERING)
    assert {failure.check for failure in found.failures} == {Check.RENDERING}


def test_what_an_engine_is_known_to_render_otherwise(model: Model, verified: Verified) -> None:
    """SGLang 0.5.23 adds a field to each tool; without tools it must render as we do."""
    system = False

    def change(body: Json, answer: Json) -> None:
        if "input_ids" not in body:
            tools = [{**tool, "defer_loading": None} for tool in body.get("tools") or ()]
            messages = [*([{"role": "system", "content": "Hi"}] if system else []), *body["messages"]]
            answer["choices"][0]["prompt_token_ids"] = rendered({**body, "tools": tools, "messages": messages})

    model.change = change
    found = verified()
    assert (found.verdict, found.failures) == (Verdict.PASS, ())
    assert found.rendering.otherwise == {'it adds "defer_loading": null to each tool, as SGLang 0.5.23 does': 2}
    assert (found.rendering.asked, found.passed[Check.RENDERING]) == (4, 2)
    system = True
    assert verified(histories=("linear",)).verdict is Verdict.FAIL


def test_an_engine_that_counts_another_prompt(model: Model, verified: Verified) -> None:
    def change(body: Json, answer: Json) -> None:
        if "input_ids" not in body:
            answer["usage"]["prompt_tokens"] += 1

    model.tells, model.change = False, change
    found = verified(allow_unverified_rendering=True)
    assert found.verdict is Verdict.FAIL
    assert "ours has" in texts(found, Check.RENDERING)


def test_an_engine_that_samples_behind_another_prompt(model: Model, verified: Verified) -> None:
    def change(body: Json, answer: Json) -> None:
        if "input_ids" in body and len(body["messages"]) > 2 and not body.get("stream"):
            answer["choices"][0]["prompt_token_ids"] = body["input_ids"][:-1]

    model.change = change
    found = verified()
    assert found.verdict is Verdict.FAIL
    assert "the engine was given another prompt than was sent" in texts(found, Check.RECORDS)


def test_an_engine_that_alters_ids(model: Model, verified: Verified) -> None:
    def change(body: Json, answer: Json) -> None:
        if "input_ids" in body:
            pairs = answer["choices"][0]["meta_info"]["output_token_logprobs"]
            pairs[len(pairs) // 2][1] = encode("7")[0]

    model.change = change
    found = verified()
    assert found.verdict is Verdict.FAIL
    assert "the sampled ids spell" in texts(found, Check.TEXT)
    assert decode(encode("7")) in texts(found, Check.TEXT)


def test_an_engine_whose_text_is_not_canonical(model: Model, verified: Verified) -> None:
    def change(body: Json, answer: Json) -> None:
        choice = answer["choices"][0]
        if "input_ids" in body and choice["message"]["content"]:
            ids = [token for char in decode(ids_of(choice)[:-1]) for token in encode(char)]
            choice["meta_info"]["output_token_logprobs"] = [[-1.0, token, None] for token in [*ids, ids_of(choice)[-1]]]
            choice["meta_info"]["completion_tokens"] = answer["usage"]["completion_tokens"] = len(ids) + 1

    model.change = change
    found = verified(max_assistant_text_share=0.1)
    assert (found.verdict, found.failures) == (Verdict.FAIL, ())
    assert found.assistant_text.exceeded
    assert verified(max_assistant_text_share=1.0).verdict is Verdict.PASS


def ids_of(choice: Json) -> list[int]:
    return [pair[1] for pair in choice["meta_info"]["output_token_logprobs"]]


def test_an_engine_that_fails_now_and_then(engine: FakeEngine, verified: Verified) -> None:
    answer = engine.always

    def sometimes(body: Json) -> Reply:
        broken = "input_ids" in body and len(body["messages"]) > 4
        return refuses(500, b'{"message": "out of luck"}') if broken else answer(body)

    engine.always = sometimes
    found = verified()
    assert found.verdict is Verdict.FAIL
    assert "HTTP 500: out of luck" in texts(found, Check.ANSWERED)


def test_an_engine_that_is_not_there(settings: ServerSettings, parts: Parts) -> None:
    here = dataclasses.replace(settings, engine_urls=("http://127.0.0.1:9",))
    with pytest.raises(EngineUnreachable, match=r"--engine http://127.0.0.1:9: no engine answers there"):
        verify_session(here, parts=parts)


def test_an_engine_of_another_model(engine: FakeEngine, verified: Verified, monkeypatch: pytest.MonkeyPatch) -> None:
    async def tokenize(self: Any, path: str, body: Json) -> tuple[int, Json]:
        return 200, {"tokens": [1, 2, 3]}

    monkeypatch.setattr("miles_core.testing.verify_session.engine.EngineProbe._post", tokenize)
    with pytest.raises(
        ConfigError, match=r"with another tokenizer than --checkpoint .*: token 0 of a probe text is 1 "
    ):
        verified()
    assert not engine.turns


# -- families at fault ---------------------------------------------------------------------------------------


def with_family(parts: Parts, **changes: Any) -> Parts:
    """The parts with another family of the same tokenizer."""
    bound = parts.family
    family = dataclasses.replace(bound.family, name="acme", **changes)
    return dataclasses.replace(parts, family=family.bind(bound.tokenizer))


def test_a_family_that_joins_wrongly(parts: Parts, verified: Verified) -> None:
    """It ends its turns without the line break that its template writes."""
    found = verified(with_family(parts, turn_end="<|im_end|>"))
    assert found.verdict is Verdict.FAIL
    assert "non_assistant_text in segment" in texts(found, Check.SELF_CHECK)


class Forgetful(BoundFamily):
    """Drops the last token of every checkpoint."""

    def join(self, checkpoint_ids: Any, suffix_ids: Any) -> tuple[int, list[int]]:
        return len(checkpoint_ids) - 1, [encode("<|im_end|>")[0], encode("\n")[0]]


def test_a_family_that_drops_sampled_tokens(parts: Parts, verified: Verified) -> None:
    found = verified(with_family(parts, bound_class=Forgetful))
    assert found.verdict is Verdict.FAIL
    assert "HTTP 500: " in texts(found, Check.ANSWERED)


def test_a_template_that_is_not_the_engines(parts: Parts, verified: Verified) -> None:
    bound = parts.family
    assert isinstance(bound.template, ChatTemplate)
    text = bound.template.text.replace("# Tools\n", "# Functions\n")
    assert text != bound.template.text
    other = BoundFamily(bound.family, bound.revision, bound.tokenizer, ChatTemplate(text, source="other.jinja"))
    found = verified(dataclasses.replace(parts, family=other))
    assert found.verdict is Verdict.FAIL
    assert "'# Functions" in texts(found, Check.RENDERING) or "Functions" in texts(found, Check.RENDERING)


# -- samples at fault ----------------------------------------------------------------------------------------


def other_tokens(sample: Json) -> None:
    sample["tokens"][-1] += 1


def untrained(sample: Json) -> None:
    sample["loss_mask"][-1] = 0


def trains_on_the_prompt(sample: Json) -> None:
    sample["loss_mask"][:] = 1


def other_log_probs(sample: Json) -> None:
    sample["rollout_log_probs"][-1] -= 0.5


def starts_later(sample: Json) -> None:
    sample["response_length"] -= 1
    sample["loss_mask"], sample["rollout_log_probs"] = sample["loss_mask"][1:], sample["rollout_log_probs"][1:]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (other_tokens, "a sample has other tokens than its turns: token "),
        (untrained, "sampled tokens are not trained on"),
        (trains_on_the_prompt, "tokens that were not sampled are trained on or have a log-probability"),
        (other_log_probs, "the sample has other log-probabilities than the engine gave"),
        (starts_later, "the response starts at token "),
    ],
)
def test_samples_that_are_not_their_turns(
    change: Callable[[Json], None], text: str, verified: Verified, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = SessionClient.samples

    async def changed(self: SessionClient, session: str) -> SamplesReply:
        reply = await fetch(self, session)
        for sample in reply.samples:
            for name in ("tokens", "loss_mask", "rollout_log_probs"):
                sample[name] = sample[name].copy()  # what is decoded cannot be written to
            change(sample)
        return reply

    monkeypatch.setattr(SessionClient, "samples", changed)
    found = verified(histories=("linear",))
    assert {failure.check for failure in found.failures} == {Check.SAMPLES}
    assert text in texts(found, Check.SAMPLES)


# -- forcing -------------------------------------------------------------------------------------------------


def test_what_is_forced_follows_from_the_template() -> None:
    forcing = forcing_of(chat_family())
    assert forcing.kwargs == {"enable_thinking": False}
    assert forcing.text == "[A-Za-z]{2,9}( [A-Za-z]{2,9}){1,5}"
    value = "[1-9][0-9]{0,2} [-+*] [1-9][0-9]{0,2}"
    start = '<tool_call>\\n\\{"name": "calculator", "arguments": \\{"expression": "'
    assert forcing.call == f'{start}{value}"\\}}\\}}\\n</tool_call>'
    assert forcing.calls == f"{forcing.call}\\n{forcing.call}"


def test_operators_of_a_regex_are_escaped() -> None:
    assert regex_of("<|a|>\n(x) [y] f.g:0") == "<\\|a\\|>\\n\\(x\\) \\[y\\] f\\.g:0"
