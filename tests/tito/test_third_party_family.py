"""A ChatML-like family of somebody else's: a template and about twenty lines, in a distribution of its own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from helpers.distributions import Site, distribution, module
from real_tokenizers import checkpoint

FAMILY = '''\
"""Acme's chat models: ChatML with reasoning blocks and tool calls in JSON."""

from miles_core import hookimpl
from miles_core.tito import JsonCalls, ParseFacts, Revision, TitoFamily

FAMILY = TitoFamily(
    name="acme",
    checkpoints=("acme/chat-8b",),
    package="acme_chat",
    revisions=(Revision(name="acme", template="acme.jinja"),),
    allowed_append_roles=("tool", "user", "assistant"),
    turn_end="<|im_end|>\\n",
    stop_tokens=("<|im_end|>",),
    trailing_tokens=("<|im_end|>", "\\n"),
    assistant_opener="<|im_start|>assistant",
    parse_facts=ParseFacts(
        reasoning=("<think>", "</think>"),
        after_reasoning="\\n",
        calls=JsonCalls(),
        before_calls="\\n",
        between_calls="\\n",
    ),
)


@hookimpl
def tito_family():
    return FAMILY
'''

TEMPLATE = """\
{%- if tools -%}
{{ "<|im_start|>tools" }}
{%- for tool in tools %}{{ "\\n" ~ tool | tojson }}{% endfor %}
{{- "<|im_end|>\\n" }}
{%- endif -%}
{%- for message in messages -%}
{{ "<|im_start|>" ~ message.role ~ "\\n" }}
{%- if message.reasoning_content %}{{ "<think>\\n" ~ message.reasoning_content ~ "\\n</think>\\n" }}{% endif -%}
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
{{ "\\n" if message.content or not loop.first }}
{{- '<tool_call>\\n{"name": ' ~ call.function.name | tojson ~ ', "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- "}\\n</tool_call>" }}
{%- endfor -%}
{{ "<|im_end|>\\n" }}
{%- endfor -%}
{{ "<|im_start|>assistant\\n" if add_generation_prompt }}"""

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": "the sea 数"}'}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "How is the sea?"},
    {"role": "assistant", "content": "I look.", "reasoning_content": "It is near.", "tool_calls": [CALL]},
    {"role": "tool", "content": "calm 🌊", "tool_call_id": "c"},
    {"role": "user", "content": "And now?"},
]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    directory = tmp_path / "site"
    directory.mkdir()
    distribution(directory, "acme-chat", groups={"miles.tito_families": {"acme": "acme_chat.family"}})
    module(directory, "acme_chat.family", FAMILY)
    (directory / "acme_chat" / "acme.jinja").write_text(TEMPLATE, "utf-8")
    return Site(directory)


def succeeded(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def render(site: Site, *rows: dict[str, Any]) -> list[dict[str, Any]]:
    file = site.path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    told = ("render", "--tito-model", "acme", "--checkpoint", str(checkpoint("qwen3")), str(file))
    return [json.loads(line) for line in succeeded(site.run(*told)).splitlines()]


def test_it_is_small() -> None:
    code = FAMILY[FAMILY.index("FAMILY = ") :]
    assert len([line for line in code.splitlines() if line.strip()]) <= 25
    assert len(TEMPLATE.splitlines()) <= 20


def test_it_passes_every_check(site: Site) -> None:
    (answer,) = json.loads(succeeded(site.run("check", "acme", "--json")))["plugins"]
    assert {check["outcome"] for check in answer["checks"]} == {"pass"}
    assert "joins turns" in {check["name"] for check in answer["checks"]}


def test_its_turns_join_to_what_it_renders(site: Site) -> None:
    first, turn, whole = render(
        site,
        {"messages": MESSAGES[:1], "tools": TOOLS},
        {"messages": MESSAGES[:2], "tools": TOOLS, "add_generation_prompt": False},
        {"messages": MESSAGES, "tools": TOOLS},
    )
    assert turn["text"].startswith(first["text"])
    # As it was rendered, as it was sampled, and cut off before the stop token.
    checkpoints = [turn["ids"], turn["ids"][:-1], turn["ids"][:-2]]
    row = {"messages": MESSAGES, "tools": TOOLS, "k": 2}
    joined = render(site, *({**row, "checkpoint_ids": ids} for ids in checkpoints))
    assert [answer["ids"] for answer in joined] == [whole["ids"]] * 3
    assert [answer["bridge_ids"] for answer in joined] == [turn["ids"][len(ids) :] for ids in checkpoints]
