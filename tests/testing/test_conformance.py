"""The conformance kit finds what is wrong, and says where."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import pytest

from miles_core.errors import ConfigError
from miles_core.plugins import Plugin, PluginRecord
from miles_core.testing import conformance
from miles_core.tito import BoundFamily, ParseFacts, TitoFamily
from miles_tito_families import default, qwen3


def report(kind: str, name: str = "p", **hooks: Callable[..., Any]) -> dict[str, tuple[str, str | None]]:
    plugin = Plugin(PluginRecord(kind, name, "zz-a", "1.0", "zz_a"), hooks, types.ModuleType("zz_a"), None)
    return {check.name: (check.outcome.value, check.reason) for check in conformance.run(plugin).checks}


def family(facts: Any, name: str | None = None) -> dict[str, tuple[str, str | None]]:
    return report("family", name or getattr(facts, "name", "p"), tito_family=lambda: facts)


def test_a_family_whose_turns_join_passes_every_check() -> None:
    assert {outcome for outcome, _ in family(qwen3.FAMILY).values()} == {"pass"}
    answers = family(default.FAMILY)
    assert answers.pop("parses what it renders")[0] == "skip"
    assert {outcome for outcome, _ in answers.values()} == {"pass"}


def test_a_family_with_a_wrong_turn_end_does_not_join() -> None:
    outcome, reason = family(dataclasses.replace(qwen3.FAMILY, turn_end="<|im_end|>"))["joins turns"]
    assert outcome == "fail"
    assert reason is not None
    assert reason.startswith("revision qwen3, user after an answer: turn 2: the joined prompt is not what")
    assert "expected '\\n<|im_start|>user" in reason
    assert "found '<|im_start|>user" in reason


def test_a_family_with_a_wrong_parser_does_not_parse() -> None:
    facts = dataclasses.replace(qwen3.FAMILY.parse_facts, inside_reasoning=("", ".\n"))
    outcome, reason = family(dataclasses.replace(qwen3.FAMILY, parse_facts=facts))["parses what it renders"]
    assert outcome == "fail"
    assert reason is not None
    assert reason.startswith("revision qwen3, one answer: turn 1: reasoning is 'Found it', expected 'Found it.'")


def test_a_family_that_trims_more_than_it_says_does_not_join() -> None:
    class Trimming(BoundFamily):
        def join(self, checkpoint_ids: Any, suffix_ids: Any) -> tuple[int, list[int]]:
            return len(checkpoint_ids) - 1, list(self.turn_end_ids)

    class Family(TitoFamily):
        def bind(self, tokenizer: Any, revision: str | None = None, **kwargs: Any) -> BoundFamily:
            whole = super().bind(tokenizer, revision, **kwargs)
            return Trimming(self, whole.revision, tokenizer, whole.template)

    facts = Family(**{f.name: getattr(qwen3.FAMILY, f.name) for f in dataclasses.fields(TitoFamily)})
    outcome, reason = family(facts)["joins turns"]
    assert outcome == "fail"
    assert reason is not None
    assert "join keeps " in reason
    assert reason.endswith(" tokens, max_trim_tokens is 0")


def test_a_family_that_needs_tokens_of_a_real_checkpoint_is_skipped_and_says_so() -> None:
    class Demanding(TitoFamily):
        def bind(self, tokenizer: Any, revision: str | None = None, **kwargs: Any) -> BoundFamily:
            raise ConfigError("the config.json of a real checkpoint is needed")

    facts = Demanding(**{f.name: getattr(qwen3.FAMILY, f.name) for f in dataclasses.fields(TitoFamily)})
    answers = family(facts)
    reason = "qwen3 needs a real checkpoint's tokenizer; see miles-plugins verify"
    assert answers["binds"] == ("skip", reason)
    assert {outcome for outcome, _ in answers.values()} == {"pass", "skip"}


def test_a_family_without_tags_is_checked_on_plain_answers() -> None:
    plain = dataclasses.replace(qwen3.FAMILY, parse_facts=ParseFacts())
    assert family(plain)["binds"] == ("pass", None)


def test_a_matcher_that_raises_fails_every_check_and_the_report_is_whole() -> None:
    def message_matches(stored: Any, replayed: Any) -> bool:
        return bool(stored["no such key"])

    answers = report("matcher", message_matches=message_matches, message_key=lambda message: message["role"])
    assert {outcome for outcome, _ in answers.values()} == {"fail"}
    assert len(answers) == 5
    _, reason = answers["is reflexive"]
    assert reason is not None
    assert reason.startswith("matcher p of zz-a 1.0 failed in message_matches: KeyError: 'no such key'")


def test_a_matcher_whose_keys_tell_matching_messages_apart_fails() -> None:
    def same_role(stored: Any, replayed: Any) -> bool:
        return bool(stored["role"] == replayed["role"])

    alike = report("matcher", message_matches=same_role, message_key=lambda message: message["role"])
    assert alike["sorts by a key"] == ("pass", None)
    outcome, reason = report("matcher", message_matches=same_role, message_key=str)["sorts by a key"]
    assert outcome == "fail"
    assert reason is not None
    assert reason.startswith("matches ")
    assert reason.endswith(" differ")
    assert report("matcher", message_matches=same_role)["sorts by a key"][0] == "skip"


def test_a_sample_hook_that_rewrites_or_invents_samples_fails() -> None:
    def rewrites(leaf_samples: Any, session_metadata: Any) -> Any:
        leaf_samples[0].reward = 1.0
        return leaf_samples

    def invents(leaf_samples: Any, session_metadata: Any) -> Any:
        return [dataclasses.replace(sample) for sample in leaf_samples]

    changed = ("fail", "pick_samples changed a sample; do that in postprocess_samples")
    assert report("sample-hook", pick_samples=rewrites)["picks a subset"] == changed
    made_up = ("fail", "pick_samples returned a sample that it was not given")
    assert report("sample-hook", pick_samples=invents)["picks a subset"] == made_up


def test_a_sample_hook_must_give_whole_samples() -> None:
    def postprocess(leaf_samples: Any, session_metadata: Any) -> Any:
        leaf_samples[0].loss_mask = [1]
        return leaf_samples

    outcome, reason = report("sample-hook", postprocess_samples=postprocess)["postprocesses to valid samples"]
    assert (outcome, reason) == ("fail", "ValueError: loss_mask has 1 entries, response_length is 3")


def test_after_a_family_that_is_none_nothing_else_is_tried() -> None:
    answers = family({"name": "qwen3"})
    assert answers["declares a family"] == ("fail", "tito_family returned dict; return a TitoFamily")
    rest = {answer for name, answer in answers.items() if name != "declares a family"}
    assert rest == {("skip", "not tried, since 'declares a family' failed")}


def test_a_family_without_stop_tokens_or_under_another_name_is_told() -> None:
    outcome, reason = family(dataclasses.replace(qwen3.FAMILY, stop_tokens=()))["declares a family"]
    assert (outcome, (reason or "").partition(":")[0]) == ("fail", "stop_tokens is empty")
    outcome, reason = family(dataclasses.replace(qwen3.FAMILY, name="other"), "qwen3")["declares a family"]
    assert (outcome, reason) == ("fail", "the family calls itself 'other', and its entry point 'qwen3'; use one name")


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"stop_tokens": "<|im_end|>"}, "stop_tokens is '<|im_end|>', expected a tuple of texts, as ('a',)"),
        ({"inner_tokens": ["<think>"]}, "inner_tokens is ['<think>'], expected a tuple of texts, as ('a',)"),
        ({"kwarg_aliases": ("ab",)}, "kwarg_aliases[0] is 'ab', expected a tuple of texts, as ('a',)"),
        ({"allowed_append_roles": ("user", "systm")}, "allowed_append_roles names 'systm', which is no role"),
    ],
)
def test_facts_of_a_wrong_type_are_refused_where_they_are_written(facts: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(qwen3.FAMILY, **facts)
    assert caught.value.message == f"family qwen3: {reason}"
