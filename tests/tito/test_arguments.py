"""Which types a tool's schema gives a parameter, and what a bare value is then."""

from __future__ import annotations

from typing import Any

import pytest

from miles_core.tito import ToolSchemas
from miles_core.tito.arguments import ANY, members_json, read_json, value_json

STRING = {"type": "string"}


def types(parameters: Any, parameter: str = "a") -> frozenset[str]:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    return ToolSchemas(tools).types_of("f", parameter)


def only(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


SCHEMAS: dict[str, tuple[Any, set[str]]] = {
    "type": (only(a=STRING), {"string"}),
    "types": (only(a={"type": ["string", "null"]}), {"string", "null"}),
    "number": (only(a={"type": "number"}), {"number", "integer"}),
    "names of Python": (only(a={"type": "str"}), {"string"}),
    "anyOf": (only(a={"anyOf": [STRING, {"type": "null"}]}), {"string", "null"}),
    "oneOf with one that says nothing": (only(a={"oneOf": [STRING, {}]}), set(ANY)),
    "allOf": (only(a={"allOf": [{"type": ["string", "null"]}, STRING]}), {"string"}),
    "allOf with one that says nothing": (only(a={"allOf": [STRING, {"minLength": 1}]}), {"string"}),
    "enum": (only(a={"enum": ["x", None]}), {"string", "null"}),
    "const": (only(a={"const": 1}), {"integer"}),
    "type and enum": (only(a={"type": ["string", "integer"], "enum": [1, 2]}), {"integer"}),
    "a contradiction": (only(a={"type": "string", "enum": [1]}), set(ANY)),
    "reference": ({**only(a={"$ref": "#/$defs/A"}), "$defs": {"A": STRING}}, {"string"}),
    "reference with more": ({**only(a={"$ref": "#/$defs/A", "title": "t"}), "$defs": {"A": STRING}}, {"string"}),
    "escaped reference": ({**only(a={"$ref": "#/$defs/a~1b~0c"}), "$defs": {"a/b~c": STRING}}, {"string"}),
    "reference into a list": ({**only(a={"$ref": "#/anyOf/1"}), "anyOf": [{}, STRING]}, {"string"}),
    "reference to nowhere": (only(a={"$ref": "#/$defs/A"}), set(ANY)),
    "reference elsewhere": (only(a={"$ref": "https://example.org/a.json"}), set(ANY)),
    "reference to itself": (only(a={"$ref": "#/properties/a"}), set(ANY)),
    "reference at the root": ({"$ref": "#/$defs/M", "$defs": {"M": only(a=STRING)}}, {"string"}),
    "allOf at the root": ({"allOf": [only(b=STRING), only(a=STRING)]}, {"string"}),
    "anyOf at the root": ({"anyOf": [only(a=STRING), only(a={"type": "null"}), only(b=STRING)]}, {"string", "null"}),
    "listed and limited at the root": ({**only(a={"type": ["string", "null"]}), "allOf": [only(a=STRING)]}, {"string"}),
    "additionalProperties": ({**only(b={"type": "null"}), "additionalProperties": STRING}, {"string"}),
    "additionalProperties beside": ({**only(a={"type": "null"}), "additionalProperties": STRING}, {"null"}),
    "additionalProperties true": ({**only(b=STRING), "additionalProperties": True}, set(ANY)),
    "not listed": (only(b=STRING), set(ANY)),
    "unknown name": (only(a={"type": "text"}), set(ANY)),
    "empty": ({}, set(ANY)),
    "true": (only(a=True), set(ANY)),
    "null": (None, set(ANY)),
    "a list": ([], set(ANY)),
    "odd": ({"properties": [], "$ref": 1, "allOf": {}, "anyOf": [1, None]}, set(ANY)),
    "odd type": (only(a={"type": {"string": 1}, "enum": "x", "anyOf": [None]}), set(ANY)),
}


@pytest.mark.parametrize(("parameters", "expected"), SCHEMAS.values(), ids=SCHEMAS.keys())
def test_types_of_a_parameter(parameters: Any, expected: set[str]) -> None:
    assert types(parameters) == expected


@pytest.mark.parametrize(
    "tools", [None, [], {}, "f", [None, 1, "f"], [{"function": None}], [{"function": {"name": 1}}]]
)
def test_tools_that_are_none_say_nothing(tools: Any) -> None:
    assert ToolSchemas(tools).types_of("f", "a") == ANY


def test_one_tool_that_is_none_does_not_hide_the_others() -> None:
    good = {"name": "f", "parameters": only(a=STRING)}
    assert ToolSchemas([None, {"type": "function", "function": good}, good]).types_of("f", "a") == {"string"}


def test_schemas_that_refer_to_each_other_come_to_an_end() -> None:
    names = [f"D{n}" for n in range(40)]
    everywhere = [{"$ref": f"#/$defs/{name}"} for name in names]
    definitions = {name: {"anyOf": everywhere, "allOf": everywhere, "properties": {}} for name in names}
    assert types({**only(a={"anyOf": everywhere}), "allOf": everywhere, "$defs": definitions}) == ANY
    deep: Any = STRING
    for _ in range(5000):
        deep = {"allOf": [deep]}
    assert types(only(a=deep)) == ANY
    assert types(deep) == ANY


VALUES = [
    ("42", {"string"}, '"42"'),
    (" x ", {"string"}, '" x "'),
    ("null", {"string"}, '"null"'),
    ("42", {"string", "integer"}, "42"),
    ("42", {"string", "null"}, '"42"'),
    ("null", {"string", "null"}, "null"),
    ("4.5", {"string", "integer"}, '"4.5"'),
    (" 42\n", {"integer"}, "42"),
    ("2.50", {"number", "integer"}, "2.50"),
    ('{ "a" : 1 }', {"object"}, '{ "a" : 1 }'),
    ("{'a': 1}", {"object"}, "\"{'a': 1}\""),
    ("abc", {"integer"}, '"abc"'),
    ("NaN", {"number"}, '"NaN"'),
    ("\u00a05", set(ANY), '"\u00a05"'),
    ("True", set(ANY), "true"),
    ("None", {"string", "null"}, "null"),
    ("None", {"string"}, '"None"'),
    ("", {"integer"}, '""'),
    ('"\\ud800"', set(ANY), '"\\"\\\\ud800\\""'),
    ("9" * 5000, {"integer"}, f'"{"9" * 5000}"'),
]


@pytest.mark.parametrize(("text", "kinds", "expected"), VALUES)
def test_a_bare_value(text: str, kinds: set[str], expected: str) -> None:
    assert value_json(text, frozenset(kinds), python_literals=True) == expected


def test_words_of_python_are_strings_where_the_format_has_none() -> None:
    assert value_json("True", ANY) == '"True"'


@pytest.mark.parametrize(("depth", "valid"), [(256, True), (257, False), (100_000, False)])
def test_how_deep_json_may_be_nested_does_not_depend_on_the_caller(depth: int, valid: bool) -> None:
    def called(deeper: int) -> bool:
        return called(deeper - 1) if deeper else read_json("[" * depth + '"]"' + "]" * depth)[1]

    assert (called(0), called(300)) == (valid, valid)
    assert read_json('["[[[["' + ', "[{"' * 5000 + "]")[1]  # brackets in strings do not count


def test_members_keep_their_spelling() -> None:
    text = ' { "a" : [1,  2] ,"b":"}, \\"", "a": 1.0, "é": {} } '
    assert members_json(text) == [("a", "[1,  2]"), ("b", '"}, \\""'), ("a", "1.0"), ("é", "{}")]
