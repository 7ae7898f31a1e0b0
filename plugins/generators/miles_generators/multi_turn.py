"""The generate function with tools: the model calls them, the answers are joined to its tokens, until it is done.

Calls are read by the family's own parser, and run at the same time. What a tool raises is its answer, as text. Tokens
that were sampled stay as they are: the answers are rendered by the family and appended. `max_new_tokens` is for each
turn; a sample that was aborted goes on in the turn where it stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from miles_core.errors import ConfigError
from miles_core.rollout import generation
from miles_core.rollout.engines import Lane
from miles_core.tito import BoundFamily
from miles_core.types import GenerateFnInput, GenerateFnOutput, Message, Sample, SampleStatus, Tool
from miles_generators.single_turn import tools_of

MAX_TURNS = 16

ExecuteTool = Callable[[str, dict[str, Any]], Any]
"""Runs one call: the tool's name and its arguments. May be async; text is the answer, other values become JSON."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How many turns, which tools, and what runs them."""
    parser.add_argument(
        "--generate-max-turns", type=int, default=MAX_TURNS, metavar="N", help="Most generations of a sample."
    )
    parser.add_argument(
        "--generate-tool-specs-path",
        metavar="PATH",
        help="The tools: a JSON file, or a dotted path to a list. Without it, metadata.tools of each prompt.",
    )
    parser.add_argument(
        "--generate-execute-tool-function-path",
        metavar="PATH",
        help="Dotted path of the function (name, arguments) that runs a call; async, or in a thread.",
    )
    parser.add_argument(
        "--generate-tool-call-parser",
        metavar="NAME",
        help="SGLang's name of the parser; the family reads calls itself, another one than its own is refused.",
    )


async def generate(input: GenerateFnInput) -> GenerateFnOutput:
    """Generate, run the calls, go on; `truncated` where the context is full, `completed` where no call is left."""
    sample = input.sample
    if not generation.is_over(sample):
        loop = _Loop.of(input)
        generation.begin(input.state, sample, loop.tools)
        try:
            async with generation.lane_of(input.state, sample) as lane:
                await loop.run(sample, lane)
        except asyncio.CancelledError:
            sample.status = SampleStatus.ABORTED  # whoever keeps it can go on from its last whole turn
            raise
        finally:
            generation.spell(input.state, sample)
    return GenerateFnOutput(sample)


@dataclass(frozen=True)
class _Loop:
    """The turns of one sample."""

    input: GenerateFnInput
    family: BoundFamily
    tools: list[Tool] | None
    execute: ExecuteTool | None
    max_turns: int

    @classmethod
    def of(cls, input: GenerateFnInput) -> _Loop:
        """Read the run's flags. Raises ConfigError naming the wrong one."""
        args, family = input.args, generation.family_of(input.state)
        _check_parser(family, getattr(args, "generate_tool_call_parser", None))
        specs = getattr(args, "generate_tool_specs_path", None)
        tools = _load_tools(specs) if specs else tools_of(input.sample)
        path = getattr(args, "generate_execute_tool_function_path", None)
        if tools and "calls" not in family.reads:
            raise ConfigError(f"family {family.name} reads no tool calls: name the model's family with --tito-model")
        if tools and not path:
            raise ConfigError("there are tools, and nothing runs them: give --generate-execute-tool-function-path")
        turns = getattr(args, "generate_max_turns", None)
        if turns is not None and turns < 1:
            raise ConfigError(f"--generate-max-turns {turns}: expected 1 or more")
        return cls(input, family, tools, _load_function(path) if path else None, turns or MAX_TURNS)

    async def run(self, sample: Sample, lane: Lane) -> None:
        """Turn after turn, from wherever the sample is."""
        turns, sampled = _progress(sample)
        prompt, kept = list(sample.tokens), len(sample.tokens)
        if sampled and sample.tokens[-1] not in self.family.stop_ids:
            turns -= 1  # this one goes on
        elif sampled:
            prompt = []  # it is over, and its calls are not answered yet
        while True:
            if prompt:
                await self._turn(sample, lane, prompt, kept, spent=sampled)
                turns, sampled = turns + 1, 0
                if sample.status is not SampleStatus.COMPLETED:
                    return
            answers = await self._answer_calls(sample) if turns < self.max_turns else []
            if not answers:
                sample.status = SampleStatus.COMPLETED
                return
            prompt, kept = self._joined(sample, answers)

    async def _turn(self, sample: Sample, lane: Lane, prompt: list[int], kept: int, *, spent: int) -> None:
        """One generation, laid over the sample; where nothing fits, the sample stays as it is, `truncated`."""
        params = generation.capped(self.input.args, len(prompt), self.input.sampling_params, spent=spent)
        if params is None:
            sample.status = SampleStatus.TRUNCATED
        elif getattr(self.input.state, "aborted", False):
            generation.append_prompt(sample, prompt, kept)  # so that no tool runs twice
            sample.status = SampleStatus.ABORTED
        else:
            try:
                reply = await generation.ask(self.input.state, lane, prompt, params)
            except asyncio.CancelledError:
                generation.append_prompt(sample, prompt, kept)
                raise
            if reply is None:
                sample.status = SampleStatus.TRUNCATED
            else:
                generation.append(self.input.args, sample, prompt, reply, kept=kept)

    # -- tools -------------------------------------------------------------------------------------------------

    async def _answer_calls(self, sample: Sample) -> list[Message]:
        """The answers to the calls of the last generation, in the order of the calls; none if it has none."""
        calls = self._last_message(sample).get("tool_calls") if self.tools else None
        if not calls:
            return []
        started = time.monotonic()
        answers = await asyncio.gather(*(self._answer(call) for call in calls))
        sample.non_generation_time += time.monotonic() - started
        return list(answers)

    async def _answer(self, call: Mapping[str, Any]) -> Message:
        name = call["function"]["name"]
        content = await self._run(name, call["function"]["arguments"])
        return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}

    async def _run(self, name: str, text: str) -> str:
        """What the tool says, or why it was not run, or what it raised."""
        known = [tool.get("function", tool).get("name") for tool in self.tools or ()]
        if name not in known:
            return f"error: no tool is named {name}; there is {', '.join(map(str, known))}"
        try:
            arguments = json.loads(text or "{}")
        except (ValueError, RecursionError) as error:
            return f"error: the arguments are not JSON: {error}"
        if not isinstance(arguments, dict):
            return "error: the arguments are not a JSON object"
        try:
            return _as_text(await self._execute(name, arguments))
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            return "error: the tool cancelled itself"
        except (Exception, SystemExit) as error:
            return f"error: {type(error).__name__}: {error}".rstrip(": ")

    async def _execute(self, name: str, arguments: dict[str, Any]) -> Any:
        assert self.execute is not None
        if inspect.iscoroutinefunction(self.execute):
            return await self.execute(name, arguments)
        result = await asyncio.to_thread(self.execute, name, arguments)
        return await result if inspect.isawaitable(result) else result

    # -- tokens ------------------------------------------------------------------------------------------------

    def _last_message(self, sample: Sample) -> Message:
        """The last generation, read by the family."""
        start = len(sample.tokens) - _progress(sample)[1]
        parser = self.family.parser(self.tools, prompt_ids=sample.tokens[:start])
        parser.feed(sample.tokens[start:])
        parser.finish()
        return parser.message()

    def _joined(self, sample: Sample, answers: Sequence[Message]) -> tuple[list[int], int]:
        """The next prompt, and how many of the sample's tokens it begins with."""
        kwargs = generation.template_kwargs(self.input.state)
        text = self.family.render_suffix(self._last_message(sample), answers, self.tools, kwargs)
        suffix = self.family.encode(text)
        kept, bridge = self.family.join(sample.tokens, suffix)
        return [*sample.tokens[:kept], *bridge, *suffix], kept


def _progress(sample: Sample) -> tuple[int, int]:
    """How many generations a sample has, and how many tokens of the last one stand at its end."""
    mask = sample.loss_mask or []
    starts = [at for at, on in enumerate(mask) if on and (at == 0 or not mask[at - 1])]
    return len(starts), len(mask) - starts[-1] if mask and mask[-1] else 0


def _as_text(result: Any) -> str:
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


# -- flags ---------------------------------------------------------------------------------------------------


def _check_parser(family: BoundFamily, wanted: str | None) -> None:
    own = family.family.tool_call_parser
    if wanted and own and wanted != own:
        raise ConfigError(
            f"--generate-tool-call-parser {wanted}: family {family.name} reads calls as {own} does; leave the flag out"
        )


@lru_cache(maxsize=8)
def _load_tools(path: str) -> list[Tool]:
    """The list in a JSON file, or the one that a dotted path names."""
    flag = f"--generate-tool-specs-path {path}"
    if Path(path).is_file():
        try:
            tools = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{flag}: {error}") from error
    else:
        tools = _import(path, flag)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(f"{flag}: expected a list of tools, as a chat request has them")
    return tools


@lru_cache(maxsize=8)
def _load_function(path: str) -> ExecuteTool:
    function = _import(path, f"--generate-execute-tool-function-path {path}")
    if not callable(function):
        raise ConfigError(f"--generate-execute-tool-function-path {path}: not a function; give package.module.name")
    execute: ExecuteTool = function
    return execute


def _import(path: str, flag: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{flag}: {error}; expected a file, or package.module.name") from error
