"""Tool-call arguments as JSON text: read whole, or put together from values that a format writes bare."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from miles_core.errors import MilesError
from miles_core.tito.json_text import JSON_SPACE, decoded
from miles_core.tito.render import normalise_tools

_PYTHON = {"True": "true", "False": "false", "None": "null"}
_KINDS = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object", "list": "array"}
"""Names that tool schemas written by hand use for JSON's types."""
ANY = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})
"""The types of a value that no schema limits."""

_UNIONS = ("anyOf", "oneOf")
_DEEPEST, _MOST_PARTS = 32, 256  # beyond them a schema says nothing

Types = frozenset[str]
Schema = Mapping[str, Any]


class ToolSchemas:
    """The parameter schemas of a request's tools, to tell a string from other values; none is fine too."""

    def __init__(self, tools: Any = None) -> None:
        self._parameters: dict[str, Any] = {}
        for tool in tools if isinstance(tools, list | tuple) else ():
            try:
                wrapped = normalise_tools([tool]) or []
            except MilesError:
                continue
            function = wrapped[0].get("function")
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                self._parameters[function["name"]] = function.get("parameters")
        self._known: dict[tuple[str, str], tuple[Types, bool]] = {}

    def types_of(self, function: str, parameter: str) -> Types:
        """JSON types that a parameter may have; all of them where the schema does not say."""
        return self._read(function, parameter)[0]

    def declares(self, function: str, parameter: str) -> bool:
        """Whether the schema lists that parameter by name."""
        return self._read(function, parameter)[1]

    def _read(self, function: str, parameter: str) -> tuple[Types, bool]:
        key = (function, parameter)
        if key not in self._known:
            self._known[key] = _SchemaReader(self._parameters.get(function)).of_parameter(parameter)
        return self._known[key]


class _SchemaReader:
    """Which types a schema allows, through `$ref`, unions, `enum` and `const`.

    Each part of the schema is read once, so that schemas which refer to themselves come to an end.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._types_of: dict[int, Types] = {}

    def of_parameter(self, name: str) -> tuple[Types, bool]:
        """The types of a parameter, and whether the schema lists it by name."""
        listed = self._members(self._root, name, {})
        schemas = listed or self._members(self._root, None, {})
        return _all_of([self._types(schema, 0) for schema in schemas]), bool(listed)

    def _members(self, schema: Any, name: str | None, seen: dict[int, list[Any]]) -> list[Any]:
        """What an object's schema and its parts say of a member; None is one that they do not list."""
        if not isinstance(schema, Mapping) or len(seen) > _MOST_PARTS:
            return []
        if id(schema) in seen:
            return seen[id(schema)]
        seen[id(schema)] = []  # what a part of it that refers back to it finds
        properties = {None: schema.get("additionalProperties")} if name is None else schema.get("properties")
        own = properties.get(name) if isinstance(properties, Mapping) else None
        found = [own] if isinstance(own, Mapping) else []
        for part in (self._referred(schema), *_branches(schema, "allOf")):
            found += self._members(part, name, seen)
        for union in _UNIONS:
            options = [self._members(part, name, seen) for part in _branches(schema, union)]
            if any(options):  # one of them holds, nobody knows which
                found.append({"anyOf": [{"allOf": option} for option in options if option]})
        seen[id(schema)] = list({id(one): one for one in found}.values())
        return seen[id(schema)]

    def _types(self, schema: Any, depth: int) -> Types:
        if not isinstance(schema, Mapping) or depth > _DEEPEST:
            return ANY
        if id(schema) not in self._types_of:
            self._types_of[id(schema)] = ANY  # what a part of it that refers back to it finds
            limits = [_named(schema.get("type")), _valued(schema)]
            limits += [self._types(part, depth + 1) for part in (self._referred(schema), *_branches(schema, "allOf"))]
            for union in _UNIONS:
                options = [self._types(part, depth + 1) for part in _branches(schema, union)]
                limits.append(frozenset().union(*options) if options else ANY)
            self._types_of[id(schema)] = _all_of(limits)
        return self._types_of[id(schema)]

    def _referred(self, schema: Schema) -> Any:
        """What `$ref` points to inside the parameters (`#/a/b`)."""
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        value: Any = self._root
        for part in reference[1:].split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list):
                value = value[int(part)] if part.isdecimal() and int(part) < len(value) else None
            else:
                value = value.get(part) if isinstance(value, Mapping) else None
        return value


def _branches(schema: Schema, key: str) -> list[Any]:
    branches = schema.get(key)
    return branches if isinstance(branches, list) else []


def _all_of(limits: Iterable[Types]) -> Types:
    """What all limits allow; anything where they contradict each other."""
    return ANY.intersection(*limits) or ANY


def _named(kinds: Any) -> Types:
    """The types that a schema's `type` names; a name that is not JSON's says nothing."""
    names = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    found = frozenset(_KINDS.get(kind, kind) for kind in names if isinstance(kind, str))
    return _with_integers(found) if found and found <= ANY else ANY


def _valued(schema: Schema) -> Types:
    """The types of the values that a schema lists."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return _with_integers(frozenset(map(json_type, values))) if isinstance(values, list) and values else ANY


def _with_integers(types: Types) -> Types:
    return types | {"integer"} if "number" in types else types


def json_type(value: Any) -> str:
    """The JSON type of a value that was read from JSON."""
    return "null" if value is None else _KINDS.get(type(value).__name__, "object")


def value_json(text: str, types: Types, *, python_literals: bool = False) -> str:
    """A bare value as JSON text.

    A string where the schema says string; else the JSON that the text is (as it was written), else a string.
    Where other types beside string are allowed, only a value of one of those is not a string.
    `python_literals` reads `True`, `False` and `None` as what they mean.
    """
    if types == {"string"}:
        return _string(text)
    bare = text.strip(JSON_SPACE)
    bare = _PYTHON.get(bare, bare) if python_literals else bare
    value, valid = read_json(bare)
    if not valid or ("string" in types and json_type(value) not in types):
        return _string(text)
    return bare


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def read_json(text: str) -> tuple[Any, bool]:
    """The value of JSON text, and whether it is one (see `decoded`)."""
    try:
        return decoded(text), True
    except (ValueError, RecursionError):
        return None, False


def object_json(members: Iterable[tuple[str, str]]) -> str:
    """A JSON object of names and values that are JSON text already."""
    return "{" + ", ".join(f"{_string(name)}: {value}" for name, value in members) + "}"


def members_json(text: str) -> list[tuple[str, str]]:
    """The members of an object that is valid JSON, each value's text as written."""
    decoder = json.JSONDecoder()
    found, at = [], text.index("{") + 1
    while (at := _next_sign(text, at)) < len(text) and text[at] != "}":
        key, at = decoder.raw_decode(text, at)
        at = _next_sign(text, text.index(":", at) + 1)
        _, end = decoder.raw_decode(text, at)
        found.append((key, text[at:end]))
        at = end
    return found


def _next_sign(text: str, at: int) -> int:
    """Where white space and commas end."""
    while at < len(text) and text[at] in JSON_SPACE + ",":
        at += 1
    return at


def duplicates(names: Sequence[str]) -> str | None:
    """The first name that stands twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
