"""Parsers that plugins register, in SGLang's own environment: `kimi26`'s keeps ids, a third party's the spelling."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.distributions import ROOT
from miles_engines.sglang_server.bridge import Bridge
from miles_engines.sglang_server.chosen import chosen
from real_sglang import python
from real_sglang.launched import ENVIRONMENT

SCRIPT = """
import json, sys, types
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.function_call.function_call_parser import FunctionCallParser

tools = [Tool(type="function", function={"name": name, "parameters": {"type": "object"}}) for name in ("f", "g")]

def shown(parser, calls):
    server = types.SimpleNamespace(tool_call_parser=parser)
    give_id = OpenAIServingChat._process_tool_call_id
    return [[call.tool_index, give_id(server, call, 5), call.name, call.parameters] for call in calls]

answers = []
for parser, text in json.load(sys.stdin):
    whole = FunctionCallParser(tools, parser)
    content, calls = whole.parse_non_stream(text) if whole.has_tool_call(text) else (text, [])
    stream = FunctionCallParser(tools, parser)
    parts = [stream.parse_stream_chunk(letter) for letter in text] + [stream.parse_stream_end()]
    answers.append({
        "content": content, "calls": shown(parser, calls),
        "streamed_content": "".join(part[0] or "" for part in parts),
        "streamed_calls": shown(parser, [call for part in parts for call in part[1]]),
        "required": str(whole.get_structure_constraint("required")),
    })
json.dump(answers, sys.stdout)
"""

SECTION = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
KIMI = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
RAW, STOCK, ACME = "kimi_k2_raw_id", "kimi_k2", "acme_qwen25"

CASES = {
    "ids": (RAW, "Let me see." + SECTION.format(KIMI.format("functions.f:7", "{}") + KIMI.format("call-g", '{"a":1}'))),
    "space": (RAW, SECTION.format(KIMI.format(" functions.g:0 ", ' {"a": "<|x|>"} '))),
    "broken": (RAW, SECTION.format(KIMI.format("functions.f:0", "{oops") + KIMI.format("functions.g:1", "{}"))),
    "cut off": (RAW, "a<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"),
    "none": (RAW, "nothing < here"),
    "stock": (STOCK, SECTION.format(KIMI.format("functions.f:7", "{}"))),
    "acme": (ACME, 'Hm.\n<tool_call>\n{"name": "other", "arguments": {"b": 1.0,"a":"\\u00fc"}}\n</tool_call>'),
}


@pytest.fixture(scope="module")
def answers() -> Iterator[dict[str, Any]]:
    """What SGLang's parsers make of the cases, with both plugins loaded as in a server."""
    sys.path.insert(0, str(ROOT / "examples" / "plugins" / "qwen25"))
    loaded = chosen("kimi26", ["acme_qwen25.configure_sglang"])
    bridge = Bridge(loaded.plugins, ["--model-path", "m"])
    try:
        environ = {**os.environ, **ENVIRONMENT}
        done = subprocess.run(
            [str(python()), "-c", SCRIPT],
            input=json.dumps(list(CASES.values())),
            env={**environ, **bridge.environment({})},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert [note.error for note in bridge.notes()] == [None]
        yield dict(zip(CASES, json.loads(done.stdout), strict=True))
    finally:
        bridge.close()
        sys.path.remove(str(ROOT / "examples" / "plugins" / "qwen25"))


def test_the_environment_has_none_of_our_packages() -> None:
    code = "import importlib.util as u; print([n for n in ('miles_core', 'pluggy', 'miles_engines') if u.find_spec(n)])"
    done = subprocess.run([str(python()), "-c", code], capture_output=True, text=True, check=True, cwd=Path(sys.prefix))
    assert done.stdout == "[]\n"


def test_kimi_ids_are_those_that_the_model_wrote(answers: dict[str, Any]) -> None:
    assert answers["ids"]["content"] == "Let me see."
    assert answers["ids"]["calls"] == [[0, "functions.f:7", "f", "{}"], [1, "call-g", "call-g", '{"a":1}']]
    assert answers["space"]["calls"] == [[0, " functions.g:0 ", "g", '{"a": "<|x|>"}']]


def test_the_stock_parser_numbers_them_anew(answers: dict[str, Any]) -> None:
    assert answers["stock"]["calls"] == [[0, "functions.f:5", "f", "{}"]]


def test_what_is_no_call_stays_text_and_costs_no_other(answers: dict[str, Any]) -> None:
    broken = answers["broken"]
    assert [call[1] for call in broken["calls"]] == ["functions.g:1"]
    assert "functions.f:0<|tool_call_argument_begin|>{oops" in broken["content"]
    assert answers["cut off"]["calls"] == []
    assert answers["cut off"]["content"] == CASES["cut off"][1]
    assert answers["none"]["content"] == "nothing < here"


def test_a_third_partys_parser_keeps_the_spelling_and_lets_sglang_name_the_call(answers: dict[str, Any]) -> None:
    ((index, call_id, name, arguments),) = answers["acme"]["calls"]
    assert (index, name, arguments) == (0, "other", '{"b": 1.0,"a":"\\u00fc"}')
    assert call_id.startswith("call_")
    assert answers["acme"]["content"] == "Hm."


@pytest.mark.parametrize("case", [name for name in CASES if name != "stock"])
def test_streamed_text_gives_the_same(answers: dict[str, Any], case: str) -> None:
    answer = answers[case]
    assert answer["streamed_content"] == answer["content"]
    own_ids = CASES[case][0] == RAW
    kept = slice(None) if own_ids else slice(2, None)
    assert [call[kept] for call in answer["streamed_calls"]] == [call[kept] for call in answer["calls"]]


def test_forced_calls_keep_the_grammar_of_the_format(answers: dict[str, Any]) -> None:
    assert "<|tool_calls_section_begin|>" in answers["ids"]["required"]
    assert answers["ids"]["required"] == answers["stock"]["required"]
