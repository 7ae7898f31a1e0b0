"""The best-effort family: the checkpoint's own template, a given one, or a clear refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.chat_tokenizer import IM_END, NEWLINE, encode, write_checkpoint
from miles_core.errors import ConfigError, InvariantError, RenderError
from miles_core.tito import BoundFamily, ChatTemplate, load_tokenizer
from miles_tito_families.default import FAMILY
from miles_tito_families.qwen3 import FAMILY as QWEN3

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]


def bound(checkpoint: Path, template: ChatTemplate | None = None) -> BoundFamily:
    return FAMILY.bind(load_tokenizer(checkpoint), template=template, checkpoint=checkpoint)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


def expect_chatml(family: BoundFamily) -> None:
    assert family.render(TALK[:1]) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    suffix = family.render_suffix(None, TALK[2:])
    assert suffix == "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    checkpoint = encode("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>")
    kept, bridge = family.join(checkpoint, family.encode(suffix))
    whole = family.encode(family.render(TALK))
    assert [*checkpoint[:kept], *bridge, *family.encode(suffix)] == whole
    assert bridge == [NEWLINE]


@pytest.mark.parametrize("place", ["file", "config", "named", "both"])
def test_the_checkpoints_own_template(checkpoint: Path, place: str) -> None:
    config: Any = {"file": None, "config": CHATML, "both": "{{ wrong }}"}.get(place)
    if place == "named":
        config = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    if place in ("file", "both"):
        (checkpoint / "chat_template.jinja").write_text(CHATML, "utf-8")
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({"chat_template": config}), "utf-8")
    family = bound(checkpoint)
    expect_chatml(family)
    assert family.family.best_effort
    assert str(checkpoint) in family.template.source


def test_a_given_template_goes_first(checkpoint: Path) -> None:
    (checkpoint / "chat_template.jinja").write_text("{{ wrong }}", "utf-8")
    expect_chatml(bound(checkpoint, ChatTemplate(CHATML, source="given.jinja")))


def test_without_a_template(checkpoint: Path) -> None:
    with pytest.raises(ConfigError) as error:
        bound(checkpoint)
    for part in ("default", str(checkpoint), "--chat-template-path", "--tito-model"):
        assert part in str(error.value)


def test_a_template_that_does_not_compile(checkpoint: Path) -> None:
    (checkpoint / "chat_template.jinja").write_text("{% for %}", "utf-8")
    with pytest.raises(RenderError, match="does not compile"):
        bound(checkpoint)


NESTED = "{% for a in [1] %}" * 25 + "{% endfor %}" * 25


@pytest.mark.parametrize(
    "text",
    ["{% continue %}", NESTED, "{% if 1 %}" * 2000, "{{ " + "(" * 3000 + " }}", "{{ 10 ** 5000 }}"],
    ids=["python", "blocks", "depth", "parentheses", "digits"],
)
def test_what_is_jinja_and_still_does_not_compile(text: str) -> None:
    with pytest.raises(RenderError, match=r"the chat template t does not compile: .") as error:
        ChatTemplate(text, source="t")
    assert error.value.status == 500


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ '{0}{1}'.format(1) }}", "IndexError"),
        ("{{ 'x'.encode('no-such') }}", "LookupError: unknown encoding"),
        ("{{ 'x'.center(10 ** 14) }}", "MemoryError"),
        ("{% include 'x' %}", "TypeError: no loader"),
    ],
)
def test_whatever_python_raises_in_a_template_is_its_refusal(text: str, reason: str) -> None:
    with pytest.raises(RenderError, match=f"the chat template t failed on these messages: {reason}"):
        ChatTemplate(text, source="t").render([], None, {}, add_generation_prompt=True)


NAMED = [{"name": "tool_use", "template": "other"}, {"name": "default", "template": CHATML}, 7, {"name": ["default"]}]


@pytest.mark.parametrize("named", [NAMED, {"tool_use": "other", "default": CHATML}], ids=["list", "object"])
def test_of_several_templates_the_default_one(checkpoint: Path, named: Any) -> None:
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}), "utf-8")
    expect_chatml(bound(checkpoint))


@pytest.mark.parametrize("size", [True, 0, -5, "7", None, 1.5])
def test_a_vocab_size_that_is_no_size_is_the_tokenizers(checkpoint: Path, size: object) -> None:
    (checkpoint / "config.json").write_text("{}", "utf-8")
    length = load_tokenizer(checkpoint).vocab_size
    (checkpoint / "config.json").write_text(json.dumps({"vocab_size": size}), "utf-8")
    assert load_tokenizer(checkpoint).vocab_size == length > 1000


def test_a_named_family_takes_no_template(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"given\.jinja"):
        QWEN3.bind(load_tokenizer(checkpoint), template=ChatTemplate(CHATML, source="given.jinja"))


def test_special_tokens_of_the_config_are_variables(checkpoint: Path) -> None:
    (checkpoint / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}" + CHATML, "utf-8")
    config = {"bos_token": "<|endoftext|>", "eos_token": {"content": "<|im_end|>"}, "pad_token": None}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    assert bound(checkpoint).render(TALK[:1]).startswith("<|endoftext|><|im_end|><|im_start|>")


def test_what_checkpoints_templates_use(checkpoint: Path) -> None:
    text = (
        "{%- for m in messages -%}{%- if loop.index0 == 5 -%}{%- break -%}{%- endif -%}"
        "{% generation %}{{ m.content | trim }}{% endgeneration %}{%- endfor -%}"
        "{{ tools | tojson }}{{ strftime_now('%Y') | length }}{{ kwarg }}"
        "{% if bad is defined %}{{ raise_exception('no') }}{% endif %}"
    )
    family = bound(checkpoint, ChatTemplate(text, source="t"))
    tool = {"type": "function", "function": {"name": "é"}}
    assert family.render(TALK[:1], [tool], {"kwarg": 7}) == f"a[{json.dumps(tool, ensure_ascii=False)}]47"
    with pytest.raises(RenderError, match="no"):
        family.render(TALK, None, {"bad": 1})


def test_any_name_may_be_a_kwarg(checkpoint: Path) -> None:
    family = bound(checkpoint, ChatTemplate("{{ documents }}{{ self }}{{ messages | length }}", source="t"))
    assert family.render(TALK, None, {"documents": ["d"], "self": 1, "messages": 0, "tools": 1}).startswith("['d']")
    assert bound(checkpoint, ChatTemplate("{{ documents }}", source="t")).render(TALK) == "None"


def test_a_template_that_minds_a_made_up_turn_is_given_the_real_one(checkpoint: Path) -> None:
    no_call = "m.role == 'tool' and not messages[loop.index0 - 1].tool_calls"
    refusal = f"{{% if {no_call} %}}{{{{ raise_exception('no call') }}}}{{% endif %}}"
    family = bound(
        checkpoint, ChatTemplate(CHATML.replace("<|im_start|>{{", refusal + "<|im_start|>{{", 1), source="t")
    )
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "content": "r"}
    suffix = family.render_suffix({"role": "assistant", "content": "", "tool_calls": [call]}, [result])
    assert suffix == "<|im_start|>tool\nr<|im_end|>\n<|im_start|>assistant\n"
    for made_up in (None, {"role": "assistant", "content": "b"}):
        with pytest.raises(RenderError, match="no call"):
            family.render_suffix(made_up, [result])


def test_a_template_that_is_not_append_only(checkpoint: Path) -> None:
    text = "{{ messages | length }}" + CHATML
    family = bound(checkpoint, ChatTemplate(text, source="t.jinja"))
    with pytest.raises(InvariantError, match=r"t\.jinja is not append-only"):
        family.render_suffix(None, TALK[2:])


def test_a_template_cannot_reach_python(checkpoint: Path) -> None:
    family = bound(checkpoint, ChatTemplate("{{ messages.__class__.__mro__ }}", source="t"))
    with pytest.raises(RenderError):
        family.render(TALK)


def test_a_template_without_end_tokens_is_joined_as_it_is(checkpoint: Path) -> None:
    text = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[a] {% endif %}"
    )
    family = bound(checkpoint, ChatTemplate(text, source="t"))
    suffix = family.render_suffix(None, TALK[2:])
    assert suffix.endswith("[user] c\n[a] ")
    ids = encode("[user] a\n[a] b")
    kept, bridge = family.join(ids, family.encode(suffix))
    assert (kept, bridge) == (len(ids), [])


def test_parsing_leaves_text(checkpoint: Path) -> None:
    family = bound(checkpoint, ChatTemplate(CHATML, source="t"))
    text = "<think>\nx\n</think>\n\n<tool_call>\n{}\n</tool_call>"
    assert family.parse([*encode(text), IM_END]) == {"role": "assistant", "content": text}
