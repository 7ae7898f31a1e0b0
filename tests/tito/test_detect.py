"""Which family a checkpoint is: by its config's model_type, its tokens and its own template."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints import CHATML, FORGETFUL, checkpoint, kimi_template, own_template
from helpers.golden import golden_names, installed_family
from miles_core.tito import ChatTemplate, Revision, TitoFamily
from miles_core.tito.checkpoint import Checkpoint
from miles_core.tito.detect import Candidate, Confidence, Detection, Verified, detect

FAMILIES = [(name, installed_family(name)) for name in sorted({each.partition("@")[0] for each in golden_names()})]

OWN = [
    ("qwen3", "qwen3.jinja", "qwen3"),
    ("qwen3", "qwen3.jinja", "qwen3_moe"),
    ("qwennext", "qwennext.jinja", "qwen3_moe"),
    ("qwennext", "qwennext.jinja", "qwen3_next"),
    ("qwen35", "qwen35.jinja", "qwen3_5_moe"),
    ("glm47@glm-4.7", "glm47.jinja", "glm4_moe"),
    ("glm47@glm-4.7", "glm47.jinja", "glm_moe_dsa"),
    ("glm47@glm-5.1", "glm47_glm51.jinja", "glm_moe_dsa"),
    ("glm47@glm-5.2", "glm47_glm52.jinja", "glm_moe_dsa"),
    ("nemotron3@nemotron3", "nemotron3.jinja", "nemotron_h"),
    ("nemotron3@ultra", "nemotron3_ultra.jinja", "nemotron_h"),
    ("minimax_m25", "minimax_m25.jinja", "minimax_m2"),
    ("minimax_m27", "minimax_m27.jinja", "minimax_m2"),
    ("inkling", "inkling.jinja", "inkling_mm_model"),
]


def found(of: Checkpoint) -> Detection:
    return detect(of, FAMILIES)


def by_name(detection: Detection, name: str) -> Candidate:
    (candidate,) = [each for each in detection.candidates if each.selector == name]
    return candidate


def reasons(candidate: Candidate) -> str:
    return "\n".join(candidate.reasons)


def qwen3(template: str | None, model_type: str = "qwen3", **more: Any) -> Checkpoint:
    return checkpoint("qwen3", {"model_type": model_type}, template, **more)


# -- surely ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", ["", FORGETFUL], ids=["append-only", "forgetful"])
@pytest.mark.parametrize(("name", "file", "model_type"), OWN)
def test_model_type_tokens_and_template_together_are_certain(
    name: str, file: str, model_type: str, before: str
) -> None:
    detection = found(checkpoint(name, {"model_type": model_type}, before + own_template(file)))
    family, _, revision = name.partition("@")
    chosen = detection.chosen
    assert chosen is not None
    assert (chosen.selector, chosen.revision.name) == (family, revision or family)
    assert (chosen.confidence, chosen.verified) == (Confidence.CERTAIN, Verified.CHECKPOINT)
    assert f"model_type {model_type} is one of the family's" in chosen.reasons
    assert [each.confidence for each in detection.candidates].count(Confidence.CERTAIN) == 1
    forgets = "only leaves out earlier reasoning" in reasons(chosen)
    assert forgets == bool(before)


@pytest.mark.parametrize(("version", "name", "other"), [("2.5", "kimi25", "kimi26"), ("2.6", "kimi26", "kimi25")])
def test_kimis_of_one_model_type_are_told_apart_by_their_later_turns(version: str, name: str, other: str) -> None:
    detection = found(checkpoint("kimi25", {"model_type": "kimi_k25"}, kimi_template(version)))
    assert detection.chosen is by_name(detection, name)
    rival = by_name(detection, other)
    assert rival.confidence is Confidence.POSSIBLE
    assert all(result.agrees for result in rival.agreement.first)
    assert "call-thinking-off" in reasons(rival)


def test_a_default_that_the_family_declares_is_no_drift() -> None:
    quiet = own_template("qwen35.jinja").replace(
        "{#-", "{%- set enable_thinking = enable_thinking is defined and enable_thinking -%}{#-", 1
    )
    detection = found(checkpoint("qwen35", {"model_type": "qwen3_5"}, quiet))
    assert detection.chosen is not None
    assert "probe question differs, as the family says: small checkpoints think only when" in reasons(detection.chosen)


@pytest.mark.parametrize(
    ("name", "model_type"),
    [("deepseekv32", "deepseek_v32"), ("deepseekv4", "deepseek_v4"), ("inkling", "inkling_mm_model")],
)
def test_a_checkpoint_whose_format_is_code_has_no_template_and_is_likely(name: str, model_type: str) -> None:
    detection = found(checkpoint(name, {"model_type": model_type}, None))
    chosen = detection.chosen
    assert chosen is not None
    assert (chosen.selector, chosen.confidence, chosen.verified) == (name, Confidence.LIKELY, Verified.FAMILY)
    assert "the checkpoint has no chat template, as checkpoints of this family may" in chosen.reasons


@pytest.mark.parametrize("config", [{"model_type": "acme_moe"}, {}], ids=["unknown", "missing"])
def test_the_template_alone_is_likely(config: dict[str, Any]) -> None:
    detection = found(checkpoint("minimax_m27", config, own_template("minimax_m27.jinja")))
    assert detection.chosen is not None
    assert (detection.chosen.selector, detection.chosen.confidence) == ("minimax_m27", Confidence.LIKELY)
    assert by_name(detection, "minimax_m25").confidence is Confidence.POSSIBLE


def test_without_a_model_type_the_architecture_tells_it() -> None:
    config = {"architectures": ["Glm4MoeForCausalLM"]}
    chosen = found(checkpoint("glm47", config, own_template("glm47.jinja"))).chosen
    assert chosen is not None
    assert chosen.confidence is Confidence.CERTAIN
    assert "architectures Glm4Moe is one of the family's" in chosen.reasons


def test_a_text_model_inside_a_larger_one() -> None:
    config = {"text_config": {"model_type": "qwen3_5_text"}}
    chosen = found(checkpoint("qwen35", config, own_template("qwen35.jinja"))).chosen
    assert chosen is not None
    assert "text_config.model_type qwen3_5_text is one of the family's" in chosen.reasons


# -- not surely -----------------------------------------------------------------------------------------------

EDITS = [
    ("{#-", "You are Acme.{#-", "question"),
    ("You may call one or more functions", "You may call functions", "spaces"),
    ('("<think>\\n\\n</think>\\n\\n"', '("<think></think>"', "thinking-off"),
    ("<tool_response>\\n", "<tool_response>", "call"),
]


@pytest.mark.parametrize(("old", "new", "probe"), EDITS, ids=[probe for _, _, probe in EDITS])
def test_an_edited_template_is_found_by_model_type_and_tokens_and_the_drift_is_named(
    old: str, new: str, probe: str
) -> None:
    text = own_template("qwen3.jinja")
    assert old in text
    detection = found(qwen3(text.replace(old, new, 1)))
    first = detection.candidates[0]
    assert (first.selector, first.confidence, first.verified) == ("qwen3", Confidence.POSSIBLE, Verified.NO)
    assert f"the template has drifted from the family's: {probe}: it writes" in reasons(first)
    assert detection.chosen is None


def test_an_edited_template_under_an_unknown_model_type_is_still_named() -> None:
    detection = found(qwen3("You are Acme." + own_template("qwen3.jinja"), "acme"))
    assert [(each.selector, each.confidence) for each in detection.fitting] == [("qwen3", Confidence.POSSIBLE)]
    assert detection.chosen is None


def test_another_format_under_a_known_model_type_is_not_taken() -> None:
    detection = found(qwen3(CHATML))
    assert detection.chosen is None
    assert [each.selector for each in detection.fitting] == ["qwen3", "qwennext"]
    assert "the template is another format, it seems" in reasons(detection.candidates[0])


def test_another_format_under_an_unknown_model_type_fits_nothing() -> None:
    detection = found(qwen3(CHATML, "acme"))
    assert (detection.chosen, detection.fitting) == (None, ())


@pytest.mark.parametrize(
    ("name", "model_type", "fitting"),
    [("qwen3", "qwen3", ["qwen3", "qwennext"]), ("kimi25", "kimi_k25", ["kimi25", "kimi26"]), ("qwen3", "acme", [])],
)
def test_without_a_template_a_shared_model_type_decides_nothing(name: str, model_type: str, fitting: list[str]) -> None:
    detection = found(checkpoint(name, {"model_type": model_type}, None))
    assert detection.chosen is None
    assert [each.selector for each in detection.fitting] == fitting
    assert {each.confidence for each in detection.fitting} <= {Confidence.POSSIBLE}


def test_a_family_whose_tokens_are_missing_does_not_fit() -> None:
    detection = found(checkpoint("inkling", {"model_type": "qwen3"}, own_template("qwen3.jinja")))
    candidate = by_name(detection, "qwen3")
    assert candidate.confidence is Confidence.NONE
    assert "<|im_end|>" in candidate.missing
    assert "the tokenizer lacks '<|im_end|>'" in reasons(candidate)
    assert detection.chosen is None


def test_a_model_that_does_not_chat_is_not_taken() -> None:
    detection = found(qwen3(own_template("qwen3.jinja"), not_chat="modules.json says that it is an embedding model"))
    first = detection.candidates[0]
    assert (first.selector, first.confidence, detection.chosen) == ("qwen3", Confidence.POSSIBLE, None)
    assert "modules.json says that it is an embedding model" in first.reasons


def test_a_template_that_does_not_compile_is_a_reason() -> None:
    broken = replace(qwen3(None), template_error="the chat template does not compile: line 1")
    first = found(broken).candidates[0]
    assert first.confidence is Confidence.POSSIBLE
    assert "nothing to compare with: the chat template does not compile: line 1" in first.reasons


def test_a_revision_that_nothing_tells_is_said() -> None:
    chosen = found(checkpoint("deepseekv4", {"model_type": "deepseek_v4"}, None)).chosen
    assert chosen is not None
    assert "the checkpoint does not tell the revision; deepseekv4 is the default" in chosen.reasons


# -- families of others ---------------------------------------------------------------------------------------


class Raising:
    """An encoder that is broken."""

    source = "raising"

    def render(self, *conversation: Any, add_generation_prompt: bool) -> str:
        raise ZeroDivisionError("no")


def acme(**more: Any) -> TitoFamily:
    """A third party's family: Qwen3's tokens, and a format of its own."""
    facts: dict[str, Any] = {
        "name": "acme",
        "checkpoints": (),
        "revisions": (Revision(name="acme", encoder=ChatTemplate(CHATML, source="acme"), model_types=("acme_lm",)),),
    }
    return replace(installed_family("qwen3"), **{**facts, **more})


def test_a_family_of_others_takes_part_on_equal_terms() -> None:
    detection = detect(qwen3(CHATML, "acme_lm"), [*FAMILIES, ("acme", acme())])
    chosen = detection.chosen
    assert chosen is not None
    assert (chosen.selector, chosen.confidence) == ("acme", Confidence.CERTAIN)
    assert "the family was checked against nothing that it names" in chosen.reasons


def test_two_families_that_fit_alike_are_unsure() -> None:
    twin = replace(installed_family("qwen3"), name="twin")
    detection = detect(qwen3(own_template("qwen3.jinja")), [*FAMILIES, ("other:twin", twin)])
    assert detection.chosen is None
    assert [each.selector for each in detection.candidates[:2]] == ["other:twin", "qwen3"]


def test_a_family_that_follows_the_checkpoints_own_template_goes_by_model_type_and_tokens(tmp_path: Path) -> None:
    follower = acme(revisions=(Revision(name="acme", model_types=("acme_lm",)),))
    of = checkpoint("qwen3", {"model_type": "acme_lm"}, CHATML)
    of.tokenizer.source = str(tmp_path)
    assert detect(of, [("acme", follower)]).chosen is None
    (tmp_path / "chat_template.jinja").write_text(CHATML, "utf-8")
    chosen = detect(of, [("acme", follower)]).chosen
    assert chosen is not None
    assert (chosen.confidence, chosen.verified) == (Confidence.LIKELY, Verified.NO)
    assert "the family follows the checkpoint's own template: there is nothing to compare" in chosen.reasons


def test_a_broken_family_stops_nothing_and_is_named() -> None:
    raising = acme(revisions=(Revision(name="acme", encoder=Raising(), model_types=("qwen3",)),))
    broken: Any = replace(acme(), revisions=None)
    families = [("acme", raising), ("broken", broken), *FAMILIES]
    detection = detect(qwen3(own_template("qwen3.jinja")), families)
    assert detection.chosen is not None
    assert detection.chosen.selector == "qwen3"
    assert by_name(detection, "acme").confidence is Confidence.POSSIBLE
    assert "raising failed: ZeroDivisionError: no" in reasons(by_name(detection, "acme"))
    assert [(each.selector, each.reason) for each in detection.skipped] == [
        ("broken", "failed: TypeError: 'NoneType' object is not iterable")
    ]


def test_best_effort_families_are_a_way_out_and_no_candidates() -> None:
    detection = detect(qwen3(CHATML, "acme"), [*FAMILIES, ("default", installed_family("default"))])
    assert detection.fallbacks == ("default",)
    assert "default" not in [each.selector for each in detection.candidates]
