"""The messages of errors as the source has them: what is given to an error class, `…` for what differs."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from helpers.pages import ROOT
from miles_core import errors

SOURCES = sorted(path for folder in ("core", "plugins") for path in (ROOT / folder).rglob("*.py"))
FOREIGN = ("UsageError", "BadParameter", "ArgumentTypeError", "ServingError", "ApiError")
"""Whose texts end before a user's eyes too: wrong use of a command, and what the local engine refuses."""

VALUE = "…"
DEPTH = 3
"""How far a text is followed through names and calls."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def letters(text: str) -> int:
    """How many letters of a text do not vary."""
    return len(re.findall(r"[A-Za-z]", text))


@cache
def source_of(path: Path) -> Source:
    """A module, read once."""
    return Source(ast.parse(path.read_text(encoding="utf-8")))


def texts(path: Path) -> Iterator[str]:
    """Every text of a module, as it stands there."""
    source = source_of(path)
    for node in source.texts:
        yield from source.spellings(node, None, depth=0) - {VALUE}


def shown(path: Path) -> set[str]:
    """Every message of a module."""
    return set(source_of(path).messages())


@cache
def error_classes() -> frozenset[str]:
    """Names of the classes whose texts people see: those of `errors`, `FOREIGN`, and what derives from them."""
    known = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    known |= set(FOREIGN)
    classes = [node for path in SOURCES for node in source_of(path).nodes if isinstance(node, ast.ClassDef)]
    while more := {node.name for node in classes if known & set(map(ast.unparse, node.bases))} - known:
        known |= more
    return frozenset(known)


def message_of(call: ast.Call) -> ast.expr | None:
    """The message in a call that makes an error, or notes what is wrong with a plugin."""
    match call.func, call.args:
        case ast.Name(id=name) | ast.Attribute(attr=name), [message, *_] if name in error_classes():
            return message
        case ast.Attribute(attr="fail", value=ast.Name(id="ctx")), [message, *_]:
            return message
        case ast.Attribute(attr="mark"), [ast.Attribute(value=ast.Name(id="State")), message, *_]:
            return message
        case ast.Name(id="Problem"), [_, message, *_]:
            return message
    return None


@cache
def constants() -> dict[str, set[str]]:
    """Texts of the modules' constants, by name."""
    found: dict[str, set[str]] = {}
    for path in SOURCES:
        for node in source_of(path).nodes:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if name.lstrip("_").isupper():
                    found.setdefault(name, set()).update(source_of(path).spellings(value, None, depth=0) - {VALUE})
    return found


class Source:
    """A module: its nodes, which of them are texts, and in which function a call stands."""

    def __init__(self, tree: ast.Module) -> None:
        self.nodes = list(ast.walk(tree))
        prose = {id(node.value) for node in self.nodes if isinstance(node, ast.Expr)}
        written = (ast.Constant, ast.JoinedStr, ast.BinOp)
        self.texts = [node for node in self.nodes if isinstance(node, written) and id(node) not in prose]
        self._calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        functions = [node for node in self.nodes if isinstance(node, Function)]
        self._named_so = {node.name: node for node in functions}
        self._within = {node: list(ast.walk(node)) for node in functions}
        self._inside = {
            id(each): function
            for function, nodes in self._within.items()  # an inner function comes after the one that it is in
            for each in nodes
            if isinstance(each, ast.Call)
        }

    def messages(self) -> Iterator[str]:
        """Every text that it gives to an error; where that is no more than values, those that its calls return."""
        for call in self._calls:
            argument = message_of(call)
            if argument is not None:
                scope = self._inside.get(id(call))
                found = self.spellings(argument, scope)
                if not any(map(letters, found)):
                    found = self.spellings(argument, scope, through_calls=True)
                yield from filter(letters, found)

    def spellings(
        self, node: ast.expr, scope: Function | None, depth: int = DEPTH, *, through_calls: bool = False
    ) -> set[str]:
        """Every form of a text in a function."""

        def each(part: ast.expr) -> set[str]:
            return self.spellings(part, scope, depth, through_calls=through_calls)

        match node:
            case ast.Constant(value=str(text)):
                return {text}
            case ast.FormattedValue(value=value):
                return each(value)
            case ast.JoinedStr(values=parts):
                return set(map("".join, itertools.product(*map(each, parts))))
            case ast.BinOp(op=ast.Add(), left=left, right=right):
                return set(map("".join, itertools.product(each(left), each(right))))
            case ast.IfExp(body=body, orelse=other):
                return each(body) | each(other)
            case ast.Name() if depth and scope is not None:
                return self._named(node, scope, depth - 1) or {VALUE}
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if through_calls and depth:
                return self._returned(name, depth - 1) or {VALUE}
        return {VALUE}

    def _named(self, name: ast.Name, scope: Function, depth: int) -> set[str]:
        """What a name was given last in its function, is given by the function's callers, or is as a constant."""
        given = [(value, scope) for value in self._assigned(name, scope)][-1:]
        found = {text for value, where in given for text in self.spellings(value, where, depth) if letters(text)}
        if not found:
            passed = self._passed(scope, name.id)
            found = {text for value, where in passed for text in self.spellings(value, where, depth)}
            # a word is a value, as a flag's name: it is a phrase that makes a message another one
            found = {text for text in found if set(text) & set(" .")}
        return found or constants().get(name.id, set())

    def _passed(self, function: Function, name: str) -> Iterator[tuple[ast.expr, Function | None]]:
        """What the module's calls of a function give for one of its arguments, if it has that one."""
        names = [argument.arg for argument in function.args.args if argument.arg not in ("self", "cls")]
        if name not in names:
            return
        at = names.index(name)
        for call in self._calls:
            match call.func:
                case ast.Name(id=called) | ast.Attribute(value=ast.Name(id="self"), attr=called) if (
                    called == function.name
                ):
                    keywords = [keyword.value for keyword in call.keywords if keyword.arg == name]
                    yield from ((value, self._inside.get(id(call))) for value in call.args[at : at + 1] or keywords)

    def _returned(self, name: str, depth: int) -> set[str]:
        """What a function of the module returns."""
        function = self._named_so.get(name)
        nodes = self._within[function] if function is not None else ()
        values = [node.value for node in nodes if isinstance(node, ast.Return) and node.value is not None]
        return {text for value in values for text in self.spellings(value, function, depth) if letters(text)}

    def _assigned(self, name: ast.Name, scope: Function) -> list[ast.expr]:
        """What a name is given in a function before it is used, in order."""
        found = [
            (node.lineno, node.value)
            for node in self._within[scope]
            if isinstance(node, ast.Assign) and node.lineno < name.lineno
            if any(isinstance(target, ast.Name) and target.id == name.id for target in node.targets)
        ]
        return [value for _, value in sorted(found, key=lambda each: each[0])]
