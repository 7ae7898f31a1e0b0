"""What reading odd text costs: in proportion to its length, whatever it looks like."""

from __future__ import annotations

import time

import pytest

from helpers.turns import byte_family

SIZE = 60_000
LIMIT = 2.0
"""Seconds of processor time; each of these takes a tenth of that, and took minutes where work was done again."""

DSML_CALL = '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">'
IN_CALL = {
    "qwen3": '<tool_call>\n{"name": "f", "arguments": {"a": "',
    "qwen35": "</think><tool_call>\n<function=f>\n<parameter=a>\n",
    "glm47": "</think><tool_call>f<arg_key>a</arg_key><arg_value>",
    "minimax_m25": '</think><minimax:tool_call>\n<invoke name="f">\n<parameter name="a">',
    "deepseekv32": "</think><｜DSML｜function_calls>\n" + DSML_CALL,
    "kimi26": '</think><|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|>{"a": "',
    "inkling": '<|content_invoke_tool_json|>{"name":"f","args":{"a":"',
}
END = {
    "qwen3": '"}}\n</tool_call>',
    "qwen35": "\n</parameter>\n</function>\n</tool_call>",
    "glm47": "</arg_value></tool_call>",
    "minimax_m25": "</parameter>\n</invoke>\n</minimax:tool_call>",
    "deepseekv32": "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "kimi26": '"}<|tool_call_end|><|tool_calls_section_end|>',
    "inkling": '"}}<|end_message|>',
}
ODD = [
    *(("qwen3", unit) for unit in ("</tool_call>", "<tool_call>", '"', '"</tool_call>",', "\n", "{", "[", "\\")),
    ("qwen3", '<tool_call>{"a": "'),
    ("qwen3", "<tool_call>{"),
    *(("qwen35", unit) for unit in ("</tool_call>", "<parameter=", "<function=", "</parameter>")),
    ("qwen35", "</parameter><parameter="),
    ("qwen35", "<tool_call>\n<function=f>\n<parameter=a>\n"),
    ("qwen35", "<tool_call><function=f>x<parameter=a>"),
    *(("glm47", unit) for unit in (" ", "<tool_call>f", "<tool_call>f</tool_call>", "</arg_value><arg_key>")),
    ("glm47", "<tool_call>f<arg_key>a</arg_key><arg_value>"),
    *(("minimax_m25", unit) for unit in ("</invoke>", '<invoke name="f">', '</parameter><parameter name="')),
    ("minimax_m25", '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">'),
    *(("deepseekv32", unit) for unit in ("</｜DSML｜invoke>", "/>", '</｜DSML｜parameter><｜DSML｜parameter name="')),
    ("deepseekv32", DSML_CALL),
    *(("kimi26", unit) for unit in ("<|tool_call_end|>", '"<|tool_call_end|>",')),
    ("kimi26", '<|tool_call_begin|>f:0<|tool_call_argument_begin|>{"a": "'),
    *(("inkling", unit) for unit in ("x", '"<|end_message|>",', "<|message_model|>")),
    ("inkling", '<|content_invoke_tool_json|>{"a":"'),
]
"""Families and what their text is a long row of."""


@pytest.mark.parametrize(("name", "unit"), ODD)
def test_odd_text_costs_in_proportion(name: str, unit: str) -> None:
    family = byte_family(name)
    odd = unit * (SIZE // len(unit))
    begun = IN_CALL[name]
    start = time.process_time()
    for text in (odd, odd + END[name], begun + odd + END[name], begun[:-1] + odd):
        family.parse(family.encode(text), None, {})
    assert time.process_time() - start < LIMIT


@pytest.mark.parametrize("name", ["qwen3", "qwen35", "inkling"])
def test_a_long_value_that_comes_token_by_token(name: str) -> None:
    family = byte_family(name)
    ids = family.encode(IN_CALL[name] + "x </ " * 8000 + END[name])
    parser = family.parser(None, {})
    start = time.process_time()
    deltas = [delta for i in ids for delta in parser.feed([i])] + parser.finish()
    assert time.process_time() - start < LIMIT
    assert len(parser.message()["tool_calls"]) == 1
    assert len(deltas) == 1
