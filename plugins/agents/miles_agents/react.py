"""An agent that works with any Python functions as its tools, over the OpenAI client.

The functions are given by dotted path (`--react-tools my_tools.search`); names, docstrings and type hints make the
tools that the model sees. Calls of one turn run at the same time, plain functions in threads; what a tool raises is its
answer. The agent grades nothing: give a reward function, or wrap it.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, NotRequired, get_type_hints

from miles_agents import chat
from miles_core.errors import ConfigError
from miles_core.types import Message, Tool

MAX_TURNS = 16


@dataclass(frozen=True)
class PythonTool:
    """A function as a tool: what the model is told of it, and how its arguments are checked."""

    function: Callable[..., Any]
    spec: Tool
    check: Callable[[Any], dict[str, Any]]

    @property
    def name(self) -> str:
        """What the model calls it."""
        return str(self.spec["function"]["name"])

    @classmethod
    def of(cls, function: Callable[..., Any]) -> PythonTool:
        """From its signature. Raises ConfigError for one that takes arguments by position only."""
        from pydantic import ConfigDict, PydanticUserError, TypeAdapter
        from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

        name = getattr(function, "__name__", type(function).__name__)
        try:
            fields = {
                each.name: hint if each.default is each.empty else NotRequired[hint]
                for each, hint in _parameters(function)
            }
            make: Any = TypedDict
            arguments = make("arguments", fields)
            arguments.__pydantic_config__ = ConfigDict(extra="allow" if _takes_any(function) else "forbid")
            adapter: TypeAdapter[dict[str, Any]] = TypeAdapter(arguments)
            schema = _untitled(adapter.json_schema())
        except (PydanticUserError, TypeError, ValueError, NameError) as error:
            raise ConfigError(f"--react-tools: {name} cannot be a tool: {error}") from error
        text = inspect.getdoc(function) or ""
        spec = {"name": name, "description": text.partition("\n\n")[0], "parameters": schema}
        return cls(function, {"type": "function", "function": spec}, adapter.validate_python)

    async def run(self, arguments: Any) -> Any:
        """Check the arguments and call the function."""
        values = self.check(arguments)
        if inspect.iscoroutinefunction(self.function):
            return await self.function(**values)
        result = await asyncio.to_thread(self.function, **values)
        return await result if inspect.isawaitable(result) else result


def _parameters(function: Callable[..., Any]) -> list[tuple[inspect.Parameter, Any]]:
    """Each parameter with its type."""
    typed = function if inspect.isroutine(function) else type(function).__call__
    hints = get_type_hints(typed, include_extras=True)
    parameters = list(inspect.signature(function).parameters.values())
    unnamed = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.VAR_POSITIONAL)]
    if unnamed:
        raise ValueError(f"a model gives arguments by name, and {', '.join(unnamed)} can only stand in its place")
    return [(each, hints.get(each.name, Any)) for each in parameters if each.kind is not each.VAR_KEYWORD]


def _takes_any(function: Callable[..., Any]) -> bool:
    """Whether it has `**kwargs`."""
    return any(each.kind is each.VAR_KEYWORD for each in inspect.signature(function).parameters.values())


def _untitled(schema: Any) -> Any:
    """Without the titles that pydantic makes of names: models read them for nothing."""
    if isinstance(schema, dict):
        return {key: _untitled(value) for key, value in schema.items() if key != "title" or not isinstance(value, str)}
    return [_untitled(value) for value in schema] if isinstance(schema, list) else schema


def load_tools(paths: Sequence[str]) -> list[PythonTool]:
    """The functions that dotted paths name: a function, a list of them, or a module's own public ones.

    Raises ConfigError naming the path, and where two tools have one name.
    """
    tools = [PythonTool.of(function) for path in paths for function in _functions(path)]
    names = [tool.name for tool in tools]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"--react-tools: there are two tools named {', '.join(twice)}; rename one")
    return tools


def _functions(path: str) -> list[Callable[..., Any]]:
    found = _import(path)
    if isinstance(found, ModuleType):
        own = [value for name, value in vars(found).items() if inspect.isfunction(value) and name[0] != "_"]
        found = [value for value in own if value.__module__ == found.__name__]
    functions = list(found) if isinstance(found, (list, tuple)) else [found]
    if not functions or not all(callable(function) for function in functions):
        raise ConfigError(f"--react-tools {path}: expected a function, a list of functions, or a module with some")
    return functions


def _import(path: str) -> Any:
    try:
        return import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise ConfigError(f"--react-tools {path}: {error}") from error
    except (ImportError, ValueError, TypeError) as error:
        raise ConfigError(f"--react-tools {path}: {error}") from error
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--react-tools {path}: {error}; give package.module.function") from error


class ReactAgent:
    """The tool loop; made without arguments as a plugin, and with tools by who uses it as a class."""

    def __init__(self, tools: Sequence[Callable[..., Any]] = (), *, max_turns: int = MAX_TURNS) -> None:
        self.tools = {tool.name: tool for tool in map(PythonTool.of, tools)}
        self.max_turns = max_turns

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Which functions are tools, and how many turns they may take."""
        parser.add_argument(
            "--react-tools",
            action="append",
            metavar="PATH",
            help="Dotted path of a function, of a list of functions, or of a module (repeatable).",
        )
        parser.add_argument("--react-max-turns", type=int, default=MAX_TURNS, metavar="N", help="Most turns.")

    def configure_agent(self, args: Any) -> None:
        """Load the tools. Raises ConfigError naming the one that is wrong."""
        self.tools = {tool.name: tool for tool in load_tools(args.react_tools or [])}
        self.max_turns = args.react_max_turns
        if self.max_turns < 1:
            raise ConfigError(f"--react-max-turns {self.max_turns}: expected 1 or more")

    async def run_agent(
        self,
        base_url: str,
        prompt: list[Message],
        request_kwargs: dict[str, Any],
        metadata: dict[str, Any],
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Ask, run the calls, ask again, until an answer has none; gives counts, tool time and the last answer."""
        messages = list(prompt)
        specs = [tool.spec for tool in self.tools.values()]
        turns, calls_run, tool_time = 0, 0, 0.0
        async with chat.client_of(base_url, chat.key_of(kwargs, metadata), agent="react") as client:
            while turns < self.max_turns:
                message, finish = await chat.ask(client, messages, specs, request_kwargs)
                turns += 1
                messages.append(message)
                calls = message.get("tool_calls")
                if not calls or finish == "length" or turns == self.max_turns:
                    break
                started = time.monotonic()
                messages += await asyncio.gather(*map(self._answer, calls))
                tool_time += time.monotonic() - started
                calls_run += len(calls)
        return {
            "turns": turns,
            "tool_calls": calls_run,
            "answer": messages[-1].get("content") or "",
            "agent_metrics": {"total_tool_time": tool_time},
        }

    async def _answer(self, call: Mapping[str, Any]) -> Message:
        function = call.get("function") or {}
        content = await self._run(str(function.get("name")), function.get("arguments"))
        return {"role": "tool", "tool_call_id": call.get("id", ""), "content": content}

    async def _run(self, name: str, text: str | None) -> str:
        """What the tool gives, as text; or why it gave nothing."""
        tool = self.tools.get(name)
        if tool is None:
            return f"error: no tool is named {name}; there is {', '.join(self.tools) or 'none'}"
        try:
            result = await tool.run(json.loads(text or "{}"))
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            return "error: the tool cancelled itself"
        except (Exception, SystemExit) as error:
            return f"error: {type(error).__name__}: {error}".rstrip(": ")
