"""Verification: every built-in family passes on real token ids, and whatever is broken is found and named."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest

from helpers.chat_tokenizer import chat_tokenizer
from helpers.golden import golden_family, golden_names, golden_rows, has_ids
from miles_core.errors import ConfigError
from miles_core.testing.verify import CHECKS, TRAJECTORIES, Outcome, Tried, bind_bare, verify
from miles_core.testing.verify.sampling import Said, said
from miles_core.tito import BoundFamily, ChatTemplate, ParseFacts, TitoFamily, normalise_messages
from miles_tito_families import minimax_m25, qwen3

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MAY_BE_SKIPPED = ("not allowed: system cannot be appended", "thinking is off")


def qwen(**facts: Any) -> BoundFamily:
    """qwen3 with other facts, on its small tokenizer."""
    return dataclasses.replace(qwen3.FAMILY, **facts).bind(chat_tokenizer())


def tried(bound: BoundFamily, name: str, **options: Any) -> Tried:
    chosen = [t for t in TRAJECTORIES if t.name == name]
    (one,) = verify(bound, thinking=options.pop("thinking", "on"), trajectories=chosen, **options).tried
    return one


def failures(one: Tried) -> dict[str, str]:
    return {name: found.reason or "" for name, found in one.failures}


# -- what passes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", golden_names())
def test_every_family_passes(name: str) -> None:
    family = golden_family(name)
    found = verify(family)
    assert not [(one.trajectory, one.thinking, failures(one)) for one in found.tried if one.outcome is Outcome.FAIL]
    assert {one.skipped for one in found.tried} <= {None, *MAY_BE_SKIPPED}
    assert len(found.tried) == len(TRAJECTORIES) * (2 if family.family.thinking_kwargs else 1)
    assert set(found.left_out) == (set() if family.family.thinking_kwargs else {"off"})
    assert found.count(Outcome.PASS) >= 45
    for one in found.tried:
        # nothing is passed over: what is not equal is declared, or a first token that only tokenizing whole text gives
        reasons = {f.reason for f in one.findings.values() if f.outcome is Outcome.DIFFERS}
        if any("otherwise" in reason for reason in reasons if reason):
            assert family.family.sampled_otherwise
        assert all(f.outcome is not Outcome.SKIP for f in one.findings.values())


@pytest.mark.parametrize("name", golden_names())
def test_what_a_model_samples_is_what_the_vectors_say(name: str) -> None:
    """The completions of the golden vectors, and no completion where history writes a turn otherwise."""
    family = golden_family(name)
    for row in golden_rows(name):
        for completion in row.get("completions", []) if has_ids(row) else []:
            turn = sampled(family, row, completion["index"])
            text = None if turn is None or turn.otherwise else turn.text
            assert text == completion["text"], row["case"]


def sampled(family: BoundFamily, row: dict[str, Any], at: int) -> Said | None:
    messages, kwargs = row["messages"], family.merge_kwargs(row["chat_template_kwargs"])

    def render(end: list[Any], *, prompt: bool) -> str:
        return family.render(end, row["tools"], kwargs, prompt)

    return said(
        family,
        render(messages[:at], prompt=True),
        render(messages[: at + 1], prompt=False),
        messages[at],
        lambda reasoning: render([*messages[:at], {**messages[at], "reasoning_content": reasoning}], prompt=False),
    )


def test_a_turn_without_reasoning_closes_the_block_that_the_prompt_opened() -> None:
    family = golden_family("glm47")
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    row = {"messages": messages, "tools": None, "chat_template_kwargs": {}}
    turn = sampled(family, row, 1)
    assert turn is not None
    assert (turn.otherwise, turn.text) == (True, "</think>a")
    assert turn.prompt.endswith("<think>")
    assert turn.history.endswith("</think>a")
    turn = sampled(golden_family("glm47@glm-5.1"), {**row, "chat_template_kwargs": {"enable_thinking": False}}, 1)
    assert turn is not None
    assert (turn.otherwise, turn.text) == (True, "a")


def test_trajectories_are_well_formed() -> None:
    assert len({t.name for t in TRAJECTORIES}) == len(TRAJECTORIES)
    assert max(len(t.name) for t in TRAJECTORIES) <= 31  # a table of 80 columns
    for trajectory in TRAJECTORIES:
        ready = normalise_messages(trajectory.messages)
        open_calls: set[str] = set()
        for message in ready:
            calls = message.get("tool_calls") or []
            assert all(isinstance(call["function"]["arguments"], dict) for call in calls)
            open_calls |= {call["id"] for call in calls}
            if message["role"] == "tool":
                assert message["tool_call_id"] in open_calls, trajectory.name
        assert trajectory.generations
        assert trajectory.generations[-1] == len(trajectory.messages) - 1
        assert ("calls" in trajectory.needs) == any(m.get("tool_calls") for m in trajectory.messages)


def test_trajectories_cover_what_they_are_for() -> None:
    appended = {m["role"] for t in TRAJECTORIES for m in t.messages[t.generations[0] + 1 :]}
    assert appended == {"user", "system", "assistant", "tool"}
    text = json.dumps([t.messages for t in TRAJECTORIES], ensure_ascii=False)
    for part in ("1e-07", "12345678901234567890", "שלום", "👩\u200d🔬", "\\n\\n", "null"):
        assert part in text
    assert max(len(t.messages) for t in TRAJECTORIES) > 40
    assert any(t.tools_later for t in TRAJECTORIES)


# -- what is broken ----------------------------------------------------------------------------------------------


def test_a_wrong_turn_end_does_not_join() -> None:
    one = tried(qwen(turn_end="<|im_end|>"), "user after an answer")
    assert one.outcome is Outcome.FAIL
    assert set(failures(one)) == {"joined", "self-check"}
    found = one.findings["joined"]
    assert found.turn == 2
    assert found.difference is not None
    assert found.difference.before.endswith("On shelf 12.<|im_end|>")
    assert found.difference.expected.startswith("\n<|im_start|>user")
    assert found.difference.actual.startswith("<|im_start|>user")


def test_a_template_that_forgets_is_not_append_only() -> None:
    class Forgetful(ChatTemplate):
        def render(self, messages: Any, tools: Any, kwargs: Any, *, add_generation_prompt: bool) -> str:
            last = max(at for at, message in enumerate(messages) if message["role"] == "user")
            kept = [
                {**message, "reasoning_content": ""} if message["role"] == "assistant" and at < last else message
                for at, message in enumerate(messages)
            ]
            return super().render(kept, tools, kwargs, add_generation_prompt=add_generation_prompt)

    family = qwen()
    own = Forgetful(family.template.text, source="forgetful")  # type: ignore[attr-defined]  # a ChatTemplate
    bound = BoundFamily(family.family, family.revision, family.tokenizer, own)
    one = tried(bound, "user after an answer")
    assert failures(one)["append-only"] == "appending user rewrites what stands before"
    difference = one.findings["append-only"].difference
    assert difference is not None
    assert difference.expected.startswith("\nFound it.\n</think>")
    assert difference.actual.lstrip().startswith("</think>")
    assert tried(bound, "one tool result").outcome is Outcome.PASS  # a result is no user message


def test_a_wrong_parser_does_not_give_the_message_back() -> None:
    facts = dataclasses.replace(qwen3.FAMILY.parse_facts, inside_reasoning=("\n", ".\n"))
    one = tried(qwen(parse_facts=facts), "one answer")
    assert list(failures(one)) == ["parsed"]
    assert "reasoning is 'Found it', expected 'Found it.'" in failures(one)["parsed"]
    assert "sampled was '<think>\\nFound it." in failures(one)["parsed"]


def test_a_family_that_reads_nothing_is_not_said_to_parse() -> None:
    one = tried(qwen(parse_facts=ParseFacts()), "one answer")
    assert one.outcome is Outcome.PASS
    assert one.findings["parsed"].outcome is Outcome.SKIP
    assert one.findings["parsed"].reason == "the family does not read reasoning"


def test_a_wrong_fact_of_the_self_check_is_found() -> None:
    one = tried(qwen(trailing_tokens=()), "one answer")
    assert list(failures(one)) == ["self-check"]
    assert failures(one)["self-check"].startswith("non_assistant_text: ")


def test_an_undeclared_difference_of_history_is_a_failure() -> None:
    family = golden_family("minimax_m25")
    facts = dataclasses.replace(minimax_m25.FAMILY, sampled_otherwise=frozenset())
    undeclared = facts.bind(family.tokenizer)
    assert tried(family, "answer without reasoning").outcome is Outcome.DIFFERS
    one = tried(undeclared, "answer without reasoning")
    expected = "history writes this turn otherwise than the generation prompt lets it be sampled"
    assert failures(one) == {"joined": expected}
    assert one.findings["append-only"].outcome is Outcome.PASS
    assert one.findings["parsed"].reason == "not reached"


class Bound(BoundFamily):
    """Joins as told."""

    drop = 0
    bridge: Sequence[int] | None = None
    error: Exception | None = None

    def join(self, checkpoint_ids: Sequence[int], suffix_ids: Sequence[int]) -> tuple[int, list[int]]:
        """As the base, apart from what the class says."""
        if self.error is not None:
            raise self.error
        kept, bridge = super().join(checkpoint_ids, suffix_ids)
        return kept - self.drop, list(bridge if self.bridge is None else self.bridge)


def joining(**how: Any) -> BoundFamily:
    return qwen(bound_class=type("Told", (Bound,), how))


def test_a_join_that_minds_only_one_way_to_end_is_found() -> None:
    newline = chat_tokenizer().encode("\n")
    reason = failures(tried(joining(bridge=newline), "user after an answer"))["joined"]
    assert reason == "the joined prompt (cut off) is not what the template writes for the whole conversation"


def test_a_join_that_drops_too_much_is_found() -> None:
    reason = failures(tried(joining(drop=1), "user after an answer"))["joined"]
    assert reason.startswith("join keeps ")
    assert reason.endswith(" tokens, max_trim_tokens is 0")


def test_code_of_a_family_that_raises_is_its_failure() -> None:
    one = tried(joining(error=ZeroDivisionError("oops")), "user after an answer")
    assert failures(one) == {"joined": "ZeroDivisionError: oops"}


def test_a_refused_role_is_not_tried_and_says_so() -> None:
    family = qwen(allowed_append_roles=("tool", "user"))
    found = verify(family, thinking="on")
    skipped = {one.trajectory: one.skipped for one in found.tried if one.skipped}
    assert skipped["system after an answer"] == "not allowed: system cannot be appended"
    assert skipped["assistant beside a tool result"] == "not allowed: assistant cannot be appended"
    assert "user after an answer" not in skipped
    assert "examples written by the client" not in skipped  # those stand in the first prompt
    assert not found.failed


def test_a_refusal_of_an_allowed_role_is_a_failure() -> None:
    family = golden_family("qwen35")
    facts = dataclasses.replace(family.family, allowed_append_roles=("tool", "user", "system", "assistant"))
    one = tried(facts.bind(family.tokenizer), "system after an answer")
    assert "only at the start of the conversation" in failures(one)["append-only"]


def test_both_role_markers_join_alike() -> None:
    class OneMarker(BoundFamily):
        def join(self, checkpoint_ids: Sequence[int], suffix_ids: Sequence[int]) -> tuple[int, list[int]]:
            user = self.tokenizer.token_to_id("<|user|>")
            return len(checkpoint_ids) - (checkpoint_ids[-1] == user), []

    family = golden_family("glm47")
    bound = dataclasses.replace(family.family, bound_class=OneMarker).bind(family.tokenizer, "glm-4.7")
    reason = failures(tried(bound, "one tool result"))["joined"]
    assert reason.startswith("the joined prompt (stopped on '<|observation|>') is not what")


# -- thinking and kwargs -----------------------------------------------------------------------------------------


def test_a_family_without_a_switch_says_so() -> None:
    family = golden_family("qwennext")
    assert verify(family, thinking="both", trajectories=TRAJECTORIES[:1]).left_out == {
        "off": "miles_tito_families/templates/qwennext.jinja has no switch for thinking"
    }
    with pytest.raises(ConfigError, match=r"--thinking off: .* has no switch for thinking; leave the flag out"):
        verify(family, thinking="off")


def test_a_switch_that_the_template_does_not_know_is_none() -> None:
    family: TitoFamily = dataclasses.replace(qwen3.FAMILY, thinking_kwargs=("think_hard",))
    assert set(verify(family.bind(chat_tokenizer()), trajectories=TRAJECTORIES[:1]).left_out) == {"off"}


def test_kwargs_that_contradict_the_family_are_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"--apply-chat-template-kwargs: .*clear_thinking=True is in conflict"):
        verify(qwen(), kwargs={"clear_thinking": True})


# -- a template without a family ---------------------------------------------------------------------------------


def bare(text: str) -> BoundFamily:
    return bind_bare(text, source="t.jinja", tokenizer=None, variables={})


def test_a_template_that_appends_passes_without_a_checkpoint() -> None:
    found = verify(bare(CHATML))
    assert not found.failed
    assert {one.thinking for one in found.tried} == {"none"}
    reasons = {one.skipped for one in found.tried if one.skipped}
    assert reasons == {
        "the format has no reasoning",
        "the format has no calls",
        "the format has no calls and no reasoning",
    }
    passed = [one for one in found.tried if one.outcome is Outcome.PASS]
    assert len(passed) > 10
    for one in passed:
        outcomes = {name: found.outcome for name, found in one.findings.items()}
        assert outcomes == {**dict.fromkeys(CHECKS[:3], Outcome.PASS), "parsed": Outcome.SKIP}


def test_a_template_that_rewrites_is_found_without_a_checkpoint() -> None:
    text = "{{ messages | length }}" + CHATML
    one = tried(bare(text), "user after an answer")
    assert failures(one)["append-only"] == "appending user rewrites what stands before"
    difference = one.findings["append-only"].difference
    assert difference is not None
    assert (difference.index, difference.before) == (0, "")
    assert difference.expected.startswith("3<|im_start|>")
    assert difference.actual.startswith("4<|im_start|>")


def test_a_template_that_refuses_does_not_rewrite() -> None:
    text = "{% for m in messages if m.role == 'system' %}{{ raise_exception('no system') }}{% endfor %}" + CHATML
    one = tried(bare(text), "system after an answer")
    assert one.skipped == "refused: the chat template t.jinja refused the messages: no system"


@pytest.mark.parametrize("text", ["", "<|im_start|>{{ messages | length }}"])
def test_a_template_that_does_not_write_what_is_said_fails(text: str) -> None:
    assert failures(tried(bare(text), "one answer"))["append-only"] == "what the user says is not written"


def test_special_tokens_of_a_checkpoint_are_made_up() -> None:
    text = "{{ bos_token + '' }}" + CHATML.replace("<|im_end|>\n", "{{ eos_token + '' }}")
    bound = bare(text)
    assert [len(bound.encode(bound.render([], None, None, False))), len(bound.turn_end_ids)] == [1, 1]
    assert tried(bound, "user after an answer").outcome is Outcome.PASS


def test_a_template_that_takes_only_short_ids_of_calls_gets_them() -> None:
    refuse = "{% if c.id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}"
    shown = "{% for c in m.tool_calls or [] %}" + refuse + "{{ c.id ~ c.function | tojson }}{% endfor %}"
    text = CHATML.replace("{{ m.content }}", "{{ m.tool_call_id }}{{ m.content }}" + shown)
    found = [one for one in verify(bare(text)).tried if one.skipped != "the format has no reasoning"]
    assert {one.outcome for one in found if one.trajectory != "call without reasoning"} == {Outcome.PASS}


def test_a_template_whose_history_leaves_out_what_the_prompt_opened() -> None:
    text = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    one = tried(bare(text), "one answer")
    assert failures(one) == {
        "joined": "history writes this turn otherwise than the generation prompt lets it be sampled"
    }


def test_a_template_that_minds_a_made_up_turn_is_tried_with_the_real_one() -> None:
    refuse = "{{ raise_exception('no call') }}"
    called = f"{{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}}{refuse}{{% endif %}}"
    shown = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    text = CHATML.replace("<|im_start|>{{ m.role }}", called + "<|im_start|>{{ m.role }}").replace(
        "{{ m.content }}", "{{ m.content }}" + shown
    )
    assert tried(bare(text), "one tool result").outcome is Outcome.PASS
