"""Tools as TypeScript, which is what Kimi K2.5 and K2.6 read: their tokenizer rewrites the JSON schemas of a request.

One namespace holds a type per function. Keys are sorted, required fields stand first, and what a type cannot say
(descriptions, limits, defaults) is a comment above the field. A schema with no TypeScript form (`oneOf`, say) makes
the whole declaration compact JSON instead, as Kimi's tokenizer has it. Scalars in comments and enums are spelled as
in Python (`True`, `None`), since the models were trained on that; lists and objects are JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from miles_core.types import Tool

_INDENT = "  "
_LIMITS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_UNION = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
_ENUM_VALUES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
}


class _NoTypeScriptError(ValueError):
    """A schema that has no TypeScript form."""


def declare_tools(tools: Sequence[Tool]) -> str:
    """The text of a tool declaration: TypeScript, or compact JSON where a schema cannot be put that way."""
    ordered = _sorted(list(tools))
    try:
        types = "\n".join(_function(tool) for tool in ordered)
    except _NoTypeScriptError:
        return json.dumps(ordered, ensure_ascii=False, separators=(",", ":"))
    return f"# Tools\n\n## functions\nnamespace functions {{\n{types}\n}}\n"


def template_variables(tools: Sequence[Tool]) -> dict[str, str]:
    """What the checkpoints' tokenizer class hands to their template for these tools."""
    return {"tools_ts_str": declare_tools(tools)}


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_sorted(item) for item in value]
    return value


def _function(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise _NoTypeScriptError("not a function")
    name = function.get("name") or "function"
    if not isinstance(name, str):
        raise _NoTypeScriptError("a name that is no text")
    parameters = _mapping(function.get("parameters") or {})
    scope = _Scope()
    described = _described(function, "")
    argument = scope.object(parameters, "")
    interfaces = []
    if scope.refers_to_root:
        # The root gets a name to refer to, and its fields the plain order of their names.
        fields = ",\n".join(scope.field(key, parameters, _INDENT) for key in parameters.get("properties", {}))
        body = f"\n{fields}\n" if fields else ""
        interfaces.append(f"interface parameters {{{body}}}\n")
        argument = "parameters"
    for key, schema in list(scope.definitions.items()):
        interfaces.append(f"{_described(_mapping(schema), '')}interface {key} {scope.type(schema, '')}\n")
    return f"{''.join(interfaces)}{described}type {name} = (_: {argument}) => any;"


class _Scope:
    """The types of one function: its definitions, and whether a schema refers to the parameters as a whole."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self.refers_to_root = False

    def type(self, schema: Any, indent: str) -> str:
        if isinstance(schema, bool):
            return "any" if schema else "null"
        schema = _mapping(schema)
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "anyOf" in schema:
            return " | ".join(self.type(choice, indent) for choice in _list(schema["anyOf"]))
        if "enum" in schema:
            return _enum(schema)
        if not schema:
            return "any"
        kind = schema.get("type")
        if isinstance(kind, list):
            return _union(kind)
        if not isinstance(kind, str):
            raise _NoTypeScriptError("a schema without a type")
        if kind == "object":
            return self.object(schema, indent)
        if kind == "array":
            return self._array(schema, indent)
        return "number" if kind == "integer" else kind

    def object(self, schema: Mapping[str, Any], indent: str) -> str:
        self.definitions.update(_mapping(schema.get("$defs") or {}))
        inner = indent + _INDENT
        names = _mapping(schema.get("properties", {}))
        required = _list(schema.get("required", []))
        fields = [self.field(name, schema, inner) for name in sorted(names, key=lambda name: name not in required)]
        others = schema.get("additionalProperties")
        if others is not None:
            kind = "never" if others is False else self.type(others, inner)
            fields.append(f"{inner}[k: string]: {kind}")
        return "{\n" + ",\n".join(fields) + f"\n{indent}}}" if fields else "{}"

    def field(self, name: str, owner: Mapping[str, Any], indent: str) -> str:
        schema = owner["properties"][name]
        mark = "" if name in owner.get("required", []) else "?"
        default = schema.get("default") if isinstance(schema, dict) else None
        comment = "" if default is None else f"{indent}// Default: {_default(default)}\n"
        return f"{_comments(schema, indent)}{comment}{indent}{name}{mark}: {self.type(schema, indent)}"

    def _array(self, schema: Mapping[str, Any], indent: str) -> str:
        items = schema.get("items") or {}
        inner = indent + _INDENT
        comments = _comments(items, inner)
        if comments:
            return f"Array<\n{comments}{inner}{self.type(items, inner)}\n{indent}>"
        return f"Array<{self.type(items, indent)}>"

    def _reference(self, target: Any) -> str:
        if target == "#":
            self.refers_to_root = True
            return "parameters"
        name = target.rpartition("/")[2] if isinstance(target, str) and target.startswith("#/$defs/") else None
        if name not in self.definitions:
            raise _NoTypeScriptError("a reference that leads nowhere")
        return str(name)


def _comments(schema: Any, indent: str) -> str:
    """What stands above a field or an array's item: its description, and its limits where its type has some."""
    if not isinstance(schema, dict):
        return ""
    kind = schema.get("type")
    plain = isinstance(kind, str) and not schema.keys() & {"$ref", "anyOf", "enum"}
    limits = [
        f"{key}: {_scalar(schema[key])}" for key in (_LIMITS.get(str(kind), ()) if plain else ()) if key in schema
    ]
    return _described(schema, indent) + (f"{indent}// {', '.join(limits)}\n" if limits else "")


def _described(schema: Mapping[str, Any], indent: str) -> str:
    description = schema.get("description") or ""
    if not isinstance(description, str):
        raise _NoTypeScriptError("a description that is no text")
    lines = description.split("\n") if description else []
    return "".join(f"{indent}// {line}\n" if line else "\n" for line in lines)


def _enum(schema: Mapping[str, Any]) -> str:
    values = _list(schema["enum"])
    kinds = schema.get("type")
    if isinstance(kinds, list):
        known = [kind for kind in kinds if kind != "null"]
        if len(kinds) not in (1, 2) or len(known) != 1:
            raise _NoTypeScriptError("an enum of several types")
        kinds = known[0]
    expected = _ENUM_VALUES.get(kinds) if isinstance(kinds, str) else None
    if expected is not None and not all(value is None or isinstance(value, expected) for value in values):
        raise _NoTypeScriptError("an enum whose values are not of its type")
    return " | ".join(f'"{value}"' if isinstance(value, str) else _scalar(value) for value in values)


def _union(kinds: Sequence[Any]) -> str:
    if not all(isinstance(kind, str) and kind in _UNION for kind in kinds):
        raise _NoTypeScriptError("a union of unknown types")
    return " | ".join(_UNION[kind] for kind in kinds)


def _default(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else _scalar(value)


def _scalar(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else str(value)


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _NoTypeScriptError("not an object")
    return value


def _list(value: Any) -> Sequence[Any]:
    if not isinstance(value, list):
        raise _NoTypeScriptError("not a list")
    return value
