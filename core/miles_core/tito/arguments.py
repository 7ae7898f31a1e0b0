"""Tool-call arguments as JSON text: read whole, or put together from values that a format writes bare."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from miles_core.errors import MilesError
from miles_core.tito.render import normalise_tools

_PYTHON = {"True": "true", "False": "false", "None": "null"}
_COMBINED = ("anyOf", "oneOf", "allOf")
_KINDS = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object", "list": "array"}
"""Names that tool schemas written by hand use for JSON's types."""

Schema = Mapping[str, Any]


class ToolSchemas:
    """The parameter schemas of a request's tools, to tell a string from other values; none is fine too."""

    def __init__(self, tools: Any = None) -> None:
        try:
            listed = normalise_tools(tools) or []
        except MilesError:
            listed = []
        functions = [tool.get("function", tool) for tool in listed]
        self._parameters = {f["name"]: f.get("parameters") for f in functions if _names_a_function(f)}

    def types_of(self, function: str, parameter: str) -> frozenset[str]:
        """JSON types that a parameter may have; empty where the schema does not say."""
        root = self._parameters.get(function)
        if not isinstance(root, Mapping):
            return frozenset()
        properties = root.get("properties")
        schema = properties.get(parameter) if isinstance(properties, Mapping) else None
        if schema is None:
            schema = root.get("additionalProperties")
        return _types(schema, root, 0)


def _names_a_function(function: Any) -> bool:
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _types(schema: Any, root: Schema, depth: int) -> frozenset[str]:
    """The types a schema allows, through `$ref`, unions, `enum` and `const`."""
    if not isinstance(schema, Mapping) or depth > 8:
        return frozenset()
    if isinstance(schema.get("$ref"), str):
        return _types(_referred(schema["$ref"], root), root, depth + 1)
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return frozenset({_KINDS.get(kinds, kinds)})
    if isinstance(kinds, list):
        return frozenset(_KINDS.get(kind, kind) for kind in kinds if isinstance(kind, str))
    for key in _COMBINED:
        if isinstance(schema.get(key), list):
            # A branch that says nothing allows everything: then nothing is known.
            found = [_types(branch, root, depth + 1) for branch in schema[key]]
            known = [types for types in found if types]
            return frozenset().union(*known) if key == "allOf" or len(known) == len(found) else frozenset()
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return frozenset(map(json_type, values)) if isinstance(values, list) else frozenset()


def _referred(reference: str, root: Schema) -> Any:
    """What `#/a/b` points to inside the parameters."""
    value: Any = root
    for part in reference.removeprefix("#/").split("/"):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def json_type(value: Any) -> str:
    """The JSON type of a value that was read from JSON."""
    if value is None:
        return "null"
    return _KINDS[type(value).__name__]


def value_json(text: str, types: frozenset[str], *, python_literals: bool = False) -> str:
    """A bare value as JSON text.

    A string where the schema says string; else the JSON that the text is (as it was written), else a string.
    Where other types beside string are allowed, only a value of one of those is not a string.
    `python_literals` reads `True`, `False` and `None` as what they mean.
    """
    if types == {"string"}:
        return _string(text)
    bare = text.strip()
    bare = _PYTHON.get(bare, bare) if python_literals else bare
    value, valid = read_json(bare)
    if not valid:
        return _string(text)
    if "string" in types and not _fits(json_type(value), types):
        return _string(text)
    return bare


def _fits(kind: str, types: frozenset[str]) -> bool:
    return kind in types or (kind == "integer" and "number" in types)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def read_json(text: str) -> tuple[Any, bool]:
    """The value of JSON text, and whether it is one: strict, without NaN, and encodable as UTF-8."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
        text.encode("utf-8")
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError):
        return None, False
    return value, True


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def object_json(members: Iterable[tuple[str, str]]) -> str:
    """A JSON object of names and values that are JSON text already."""
    return "{" + ", ".join(f"{_string(name)}: {value}" for name, value in members) + "}"


def member_json(text: str, name: str) -> str | None:
    """The text of a member's value in valid JSON of an object, as written; of several, the last, as readers take it."""
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    found, at = None, text.index("{") + 1
    while at < len(text):
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        if at >= len(text) or text[at] == "}":
            break
        key, at = decoder.raw_decode(text, at)
        at = text.index(":", at) + 1
        while text[at] in " \t\r\n":
            at += 1
        _, end = decoder.raw_decode(text, at)
        if key == name:
            found = text[at:end]
        at = end
    return found


def duplicates(names: Sequence[str]) -> str | None:
    """The first name that stands twice."""
    return next((name for at, name in enumerate(names) if name in names[:at]), None)
