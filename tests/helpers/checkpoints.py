"""Checkpoints without weights for detection: real tokenizers, and templates as vendors and fine-tuners change them."""

from __future__ import annotations

import json
import shutil
from copy import copy
from importlib import resources
from pathlib import Path
from typing import Any

from helpers.golden import real_tokenizer, tokenizer_name
from miles_core.tito import ChatTemplate
from miles_core.tito.checkpoint import Checkpoint
from real_tokenizers import checkpoint as tokenizer_folder

CHATML = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""A template that knows neither tools nor thinking."""

FORGETFUL = """\
{%- set scan = namespace(last=-1, out=[]) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set scan.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
{%- set old = m.role == 'assistant' and loop.index0 < scan.last -%}
{%- set scan.out = scan.out + [dict(m, reasoning_content='') if old else m] -%}
{%- endfor -%}
{%- set messages = scan.out -%}
"""
"""Put before a template of ours, it drops the reasoning of all turns before the last user message, as vendors' do."""

KIMI = """\
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>
{%- if tools_ts_str %}{{ tools_ts_str }}{% else %}{{ tools | tojson(separators=(',', ':')) }}{% endif -%}
<|im_end|>{%- endif -%}
{%- set scan = namespace(last=-1) -%}
{%- for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}{% set scan.last = loop.index0 %}{% endif %}
{%- endfor -%}
{%- for m in messages -%}
{{ '<|im_' + ('system' if m.role == 'tool' else m.role) + '|>' + m.role + '<|im_middle|>' }}
{%- if m.role == 'assistant' -%}
{%- set reasoning = KEY -%}
{%- if KEEP %}{{ '<think>' + reasoning + '</think>' }}{% else %}{{ '<think></think>' }}{% endif -%}
{{ m.content }}
{%- if m.tool_calls %}<|tool_calls_section_begin|>
{%- for call in m.tool_calls -%}
{{ '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
{{- call.function.arguments | tojson }}<|tool_call_end|>
{%- endfor %}<|tool_calls_section_end|>{% endif -%}
{%- elif m.role == 'tool' -%}{{ '## Return of ' + m.tool_call_id + '\\n' + m.content }}
{%- else %}{{ m.content }}{% endif -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_assistant|>assistant<|im_middle|><think>{{ '</think>' if thinking is defined and thinking is false else '' }}
{%- endif -%}
"""
"""Kimi's format as a template, from the facts: `kimi_template` fills in what K2.5 and K2.6 differ in."""


def kimi_template(version: str) -> str:
    """The template that a checkpoint of Kimi K2.5 (`"2.5"`) or K2.6 may carry."""
    shown = "(thinking is not defined or thinking is not false)"
    if version == "2.5":
        key, keep = "m.reasoning_content or ''", f"loop.index0 > scan.last and {shown}"
    else:
        key = "m.reasoning or m.reasoning_content or ''"
        keep = f"(preserve_thinking is defined and preserve_thinking) or (loop.index0 > scan.last and {shown})"
    return KIMI.replace("KEY", key).replace("KEEP", keep)


def own_template(file: str) -> str:
    """A template that a built-in family brings."""
    return resources.files("miles_tito_families").joinpath("templates", file).read_text(encoding="utf-8")


def checkpoint(name: str, config: dict[str, Any], template: str | None, *, not_chat: str | None = None) -> Checkpoint:
    """What would be read of a checkpoint with the tokenizer of family `name`, and this config and template."""
    tokenizer = copy(real_tokenizer(name))
    tokenizer.config = config
    return Checkpoint(
        tokenizer=tokenizer,
        template=None if template is None else ChatTemplate(template, source="the checkpoint"),
        not_chat=not_chat,
    )


def write_checkpoint(folder: Path, name: str, config: dict[str, Any] | None, template: str | None) -> Path:
    """The same as a directory; returned."""
    folder.mkdir(parents=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer_folder(tokenizer_name(name)) / file, folder / file)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, "utf-8")
    return folder
