"""A checkpoint whose own template writes something else than the family: found, named, and silent where it may differ.

`tests/data/official.json.gz` has what checkpoints' templates write for golden conversations, where it is not what the
families write: reasoning of earlier turns is missing, and nothing else.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import logging
import time
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from helpers.chat_tokenizer import write_checkpoint
from helpers.golden import DATA, Row, golden_family, golden_names, golden_rows
from miles_core.errors import ConfigError, RenderError
from miles_core.tito import BoundFamily, ChatTemplate, load_tokenizer, render
from miles_core.tito.drift import Drift, check_template, find_drift, line
from miles_core.tito.probes import PROBES, Probe
from miles_tito_families import qwen3

OWN = resources.files("miles_tito_families").joinpath("templates/qwen3.jinja").read_text(encoding="utf-8")

FORGET = """
{%- set last = namespace(user=-1) -%}
{%- for message in messages if message.role == "user" -%}{%- set last.user = messages.index(message) -%}{%- endfor -%}
{%- set kept = namespace(messages=[]) -%}
{%- for message in messages -%}
{%- if message.role == "assistant" and loop.index0 < last.user -%}
{%- set kept.messages = kept.messages + [dict(message, reasoning_content="")] -%}
{%- else -%}
{%- set kept.messages = kept.messages + [message] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = kept.messages -%}
"""
"""Ahead of a template: it forgets the reasoning of turns before the last user message, as checkpoints' do."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


def carrying(checkpoint: Path, template: str) -> BoundFamily:
    """qwen3, bound to a checkpoint that carries a template."""
    (checkpoint / "chat_template.jinja").write_text(template, "utf-8")
    return qwen3.FAMILY.bind(load_tokenizer(checkpoint))


def changed(old: str, new: str) -> str:
    assert old in OWN
    return OWN.replace(old, new)


def names(drift: Drift) -> set[str]:
    return {found.probe for found in drift.differences}


def test_an_unchanged_template_is_silent(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    family = carrying(checkpoint, OWN)
    drift = find_drift(family)
    assert (len(drift.agreed), drift.differences, drift.unknown) == (len(PROBES), (), None)
    check_template(family, strict=True)
    assert not caplog.records


def test_reasoning_that_is_forgotten_is_silent(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    family = carrying(checkpoint, FORGET + OWN)
    drift = find_drift(family)
    assert not drift.differences
    assert set(drift.shorter) >= {"answer-reasoned", "call-user"}
    check_template(family, strict=True)
    assert not caplog.records


HISTORY = {"call", "parallel-calls", "call-thinking-off", "call-alone", "call-plain", "call-user"}
CHANGES = {
    "a newline more": ('<|im_end|>\\n" }}\n{%- elif message.role == "tool"',
                       '<|im_end|>\\n\\n" }}\n{%- elif message.role == "tool"',
                       HISTORY | {"answer-plain", "answer-reasoned", "call-reasoning-key"}),
    "another tool header": ("# Tools\n", "# Functions\n", {p.name for p in PROBES if p.tools}),
    "another wrapper of results": ("<tool_response>", "<tool_result>", {p.name for p in PROBES if "call" in p.name}),
    "another call format": ('"arguments": {{', '"parameters": {{', {p.name for p in PROBES if "call" in p.name}),
    "a thinking switch of another name": ("enable_thinking", "think", {"thinking-off", "call-thinking-off"}),
    "an opened reasoning block": ("<think>\\n\\n</think>\\n\\n", "<think>\\n", {"thinking-off", "call-thinking-off"}),
    "reasoning written otherwise": ('<think>\\n" ~ said.reasoning', '<think> " ~ said.reasoning',
                                    HISTORY - {"call-plain"} | {"answer-reasoned"}),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_small_change_is_named(checkpoint: Path, change: str) -> None:
    old, new, where = CHANGES[change]
    drift = find_drift(carrying(checkpoint, changed(old, new)))
    assert names(drift) == where
    for found in drift.differences:
        assert found.difference is not None
        assert found.difference.expected != found.difference.actual


def test_a_default_system_prompt_is_found_where_there_is_none(checkpoint: Path) -> None:
    added = '{% set messages = [{"role": "system", "content": "Be good."}] + messages %}'
    prompt = f'{{% if messages[0].role != "system" %}}{added}{{% endif %}}'
    drift = find_drift(carrying(checkpoint, prompt + OWN))
    assert names(drift) == {p.name for p in PROBES if p.messages[0]["role"] != "system"}
    first = drift.differences[0]
    assert first.probe == "question"
    assert first.difference is not None
    assert first.difference.actual.startswith("<|im_start|>system\nBe good.<|im_end|>")
    assert first.difference.expected.startswith("<|im_start|>user\n")


def test_forgetting_hides_no_other_change_of_later_turns(checkpoint: Path) -> None:
    text = FORGET + changed("<tool_response>", "<tool_result>")
    drift = find_drift(carrying(checkpoint, text))
    assert "call-user" in names(drift)
    found = next(found for found in drift.differences if found.probe == "call-user")
    assert found.difference is not None
    assert "<tool_result>" in found.difference.actual  # and not the reasoning, which may be missing
    assert "<tool_response>" in found.difference.expected


def test_first_turns_must_not_lose_anything(checkpoint: Path) -> None:
    text = changed('("<think>\\n\\n</think>\\n\\n" if', '("" if')
    assert names(find_drift(carrying(checkpoint, text))) == {"thinking-off", "call-thinking-off"}


def test_a_template_that_refuses_is_a_difference(checkpoint: Path) -> None:
    drift = find_drift(carrying(checkpoint, '{% if tools %}{{ raise_exception("no tools, please") }}{% endif %}' + OWN))
    assert names(drift) == {p.name for p in PROBES if p.tools}
    assert "no tools, please" in line(drift.differences[0])


def test_what_the_family_declares_is_no_drift(checkpoint: Path) -> None:
    family = dataclasses.replace(qwen3.FAMILY, template_differs={"thinking-off": "of old"})
    (checkpoint / "chat_template.jinja").write_text(changed("enable_thinking", "think"), "utf-8")
    drift = find_drift(family.bind(load_tokenizer(checkpoint)))
    assert names(drift) == {"call-thinking-off"}
    assert drift.declared == {"thinking-off": "of old"}


def test_texts_that_are_the_same_tokens_agree(checkpoint: Path) -> None:
    # the tokenizer composes characters, so that a template that decomposes one does nothing
    drift = find_drift(
        carrying(checkpoint, '{% set messages = (messages | tojson | replace("ù", "u\\u0300")) | fromjson %}' + OWN)
    )
    assert drift.broken  # there is no such filter
    family = carrying(checkpoint, OWN)

    class Decomposing(ChatTemplate):
        def render(self, *args: Any, **kwargs: Any) -> str:
            return super().render(*args, **kwargs).replace("ù", "u\u0300")

    drift = find_drift(family, Decomposing(OWN, source="it"))
    assert not drift.differences
    assert "spaces" in drift.agreed


def test_a_checkpoint_without_a_template(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    family = qwen3.FAMILY.bind(load_tokenizer(checkpoint))
    assert find_drift(family).unknown == f"{checkpoint} carries no chat template"
    check_template(family, strict=True)
    assert not caplog.records


@pytest.mark.parametrize("template", ["{% for %}", "{{ nothing", "\ud800"])
def test_a_template_that_cannot_be_read_is_a_warning_and_never_an_error(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, template: str
) -> None:
    (checkpoint / "chat_template.jinja").write_bytes(template.encode("utf-8", "surrogatepass"))
    family = qwen3.FAMILY.bind(load_tokenizer(checkpoint))
    check_template(family, strict=True)
    assert [record.name for record in caplog.records] == ["miles.tito"]
    assert f"the chat template of {checkpoint} was not compared with family qwen3: " in caplog.text


def test_a_tokenizer_without_a_checkpoint_does_not_look_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "chat_template.jinja").write_text("not mine")
    monkeypatch.chdir(tmp_path)
    family = qwen3.FAMILY.bind(load_tokenizer(write_checkpoint(tmp_path / "model")))
    family.tokenizer.source = ""
    assert find_drift(family).unknown == "the tokenizer carries no chat template"


def test_the_warning_says_what_where_and_what_next(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    family = carrying(checkpoint, changed("# Tools\n", "# Functions\n"))
    check_template(family, strict=False)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("miles.tito", logging.WARNING)
    first, *rest = record.getMessage().splitlines()
    assert first == (
        f"the chat template of {checkpoint} is not the one that family qwen3@qwen3 follows: "
        f"it differs on {len([p for p in PROBES if p.tools])} of {len(PROBES)} probes"
    )
    assert rest[0].startswith("  spaces: it writes ")
    assert "# Functions" in rest[0]
    assert "# Tools" in rest[0]
    assert rest[-3].startswith("  and ")
    assert "sessions follow the family's" in rest[-2]
    assert f"miles-plugins detect {checkpoint}" in rest[-1]


def test_strict_makes_it_an_error(checkpoint: Path) -> None:
    family = carrying(checkpoint, changed("# Tools\n", "# Functions\n"))
    with pytest.raises(ConfigError, match=r"^--strict-template: the chat template of .* is not the one that family"):
        check_template(family, strict=True)


def test_it_costs_little_at_start_up(checkpoint: Path) -> None:
    family = carrying(checkpoint, FORGET + OWN)
    times = []
    for _ in range(3):
        render._compiled.cache_clear()
        started = time.process_time()
        check_template(family, strict=True)
        times.append(time.process_time() - started)
    assert min(times) < 0.125  # 35 ms on a free machine; here other tests share the processor's caches


# -- every family ------------------------------------------------------------------------------------------------


def with_templates() -> list[str]:
    return [name for name in golden_names() if hasattr(golden_family(name).template, "text")]


@pytest.mark.parametrize("name", with_templates())
def test_forgetting_is_silent_for_every_template(name: str) -> None:
    family = golden_family(name)
    text = family.template.text  # type: ignore[attr-defined]  # a ChatTemplate, as with_templates says
    drift = find_drift(family, ChatTemplate(FORGET + text, source="it"))
    assert not drift.differences
    assert len(drift.agreed) + len(drift.shorter) == len(PROBES)


@cache
def official() -> dict[str, dict[str, str]]:
    texts: dict[str, dict[str, str]] = json.loads(gzip.decompress((DATA / "official.json.gz").read_bytes()))
    return texts


class Official:
    """A template that writes one conversation as the checkpoint's does."""

    source = "the checkpoint"

    def __init__(self, text: str) -> None:
        self._text = text

    def render(self, *_: object, **__: object) -> str:
        """The text."""
        return self._text


def probe_of(row: Row) -> Probe:
    first = all(message["role"] != "assistant" for message in row["messages"])
    return Probe(
        name=row["case"],
        messages=tuple(row["messages"]),
        tools=tuple(row["tools"] or ()),
        kwargs=row["chat_template_kwargs"],
        first_turn=first,
    )


@pytest.mark.parametrize("name", sorted(official()))
def test_checkpoints_templates_differ_in_earlier_reasoning_only(name: str) -> None:
    family, texts = golden_family(name), official()[name]
    rows = [row for row in golden_rows(name) if row["add_generation_prompt"] and row["case"] in texts]
    assert len(rows) == len(texts)
    for row in rows:
        drift = find_drift(family, Official(texts[row["case"]]), probes=[probe_of(row)])
        assert drift.shorter == (row["case"],), drift.differences


@pytest.mark.parametrize("name", sorted(official()))
def test_a_changed_official_text_is_found(name: str) -> None:
    """The same texts with another user's text are no less text, and no reasoning."""
    family, texts = golden_family(name), official()[name]
    for row in golden_rows(name):
        if row["add_generation_prompt"] and row["case"] in texts:
            user = next(message["content"] for message in row["messages"] if message["role"] == "user")
            text = user if isinstance(user, str) else user[0]["text"]
            other = texts[row["case"]].replace(text, text + ".")
            drift = find_drift(family, Official(other), probes=[probe_of(row)])
            assert [found.probe for found in drift.differences] == [row["case"]]


KIMI = """
{%- if tools_ts_str -%}<|im_system|>tool_declare<|im_middle|>{{ tools_ts_str }}<|im_end|>
{%- elif tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}
{%- for m in messages -%}
<|im_{{ "system" if m.role == "tool" else m.role }}|>{{ m.name or m.role }}<|im_middle|>
{%- if m.role == "tool" -%}## Return of {{ m.tool_call_id }}{{ "\\n" }}{%- endif -%}
{%- if m.role == "assistant" -%}<think>{{ m.reasoning_content if thinking is not false }}</think>{%- endif -%}
{{ m.content }}
{%- if m.tool_calls -%}<|tool_calls_section_begin|>{%- for c in m.tool_calls -%}
<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>
{%- endfor -%}<|tool_calls_section_end|>{%- endif -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_assistant|>assistant<|im_middle|><think>{{ "</think>" if thinking is false }}
{%- endif -%}
"""


def test_kimis_template_is_given_the_tools_as_its_tokenizer_class_writes_them() -> None:
    family = golden_family("kimi25")
    drift = find_drift(family, ChatTemplate(KIMI, source="it"))
    assert not drift.differences
    json_only = find_drift(family, ChatTemplate(KIMI.replace("tools_ts_str", "unknown"), source="it"))
    assert names(json_only) == {p.name for p in PROBES if p.tools}


def test_small_checkpoints_of_qwen35_may_think_only_when_told_to() -> None:
    family = golden_family("qwen35")
    text = family.template.text  # type: ignore[attr-defined]  # a ChatTemplate
    old = "enable_thinking is defined and enable_thinking is false"
    assert old in text
    drift = find_drift(family, ChatTemplate(text.replace(old, "not enable_thinking"), source="it"))
    assert (set(drift.declared), drift.differences) == ({"question"}, ())


def test_a_renderer_of_somebody_elses_may_raise_anything(checkpoint: Path) -> None:
    class Odd:
        source = "odd"

        def render(self, *_: object, **__: object) -> str:
            raise ZeroDivisionError("odd")

    drift = find_drift(carrying(checkpoint, OWN), Odd())
    assert len(drift.differences) == len(PROBES)
    assert "ZeroDivisionError" in line(drift.differences[0])
    with pytest.raises(RenderError):
        ChatTemplate("{{ 1 // 0 }}", source="t").render([], None, {}, add_generation_prompt=False)


def test_facts_of_somebody_elses_may_raise_anything_and_stop_nothing(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def variables(tools: Any) -> Any:
        raise KeyError("tools")

    (checkpoint / "chat_template.jinja").write_text(OWN, "utf-8")
    family = dataclasses.replace(qwen3.FAMILY, template_variables=variables)
    check_template(family.bind(load_tokenizer(checkpoint)), strict=True)
    assert "was not compared with family qwen3: KeyError" in caplog.text


def test_a_template_that_writes_what_is_not_unicode(checkpoint: Path) -> None:
    drift = find_drift(carrying(checkpoint, OWN + '{{ "\\ud800" }}'))
    assert len(drift.differences) == len(PROBES)
