"""Both forms of generate functions, classes, plugins and paths."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Any

import pytest

from miles_core.errors import MilesError, PluginContractError, PluginLoadError
from miles_core.rollout.loader import load_generate_function
from miles_core.types import GenerateFnInput, GenerateFnOutput, Sample


class State:
    args = "the args"


def given() -> GenerateFnInput:
    return GenerateFnInput(State(), Sample(), {"temperature": 1.0}, evaluation=True)


async def new_form(input: GenerateFnInput) -> GenerateFnOutput:
    return GenerateFnOutput(input.sample)


async def older_form(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample.metadata = {"args": args, **sampling_params}
    return sample


async def older_form_with_evaluation(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Sample]:
    sample.metadata = {"evaluation": evaluation}
    return [sample, Sample()]


class Callable_:
    async def __call__(self, input: GenerateFnInput) -> GenerateFnOutput:
        return GenerateFnOutput(input.sample)


class Plugin:
    def has(self, hook: str) -> bool:
        return hook == "generate"

    def hook(self, hook: str) -> Any:
        return {"generate": new_form}[hook]


@pytest.mark.parametrize("source", [new_form, Callable_, Callable_(), Plugin(), f"{__name__}.new_form"])
async def test_the_new_form(source: Any) -> None:
    if isinstance(source, str):
        source = new_form if "." not in __name__ else source
    sample = given()
    assert (await load_generate_function(source)(sample)).samples is sample.sample


async def test_the_older_form() -> None:
    output = await load_generate_function(older_form)(given())
    assert output.as_list()[0].metadata == {"args": "the args", "temperature": 1.0}


async def test_the_older_form_with_evaluation_and_a_list() -> None:
    output = await load_generate_function(older_form_with_evaluation)(given())
    assert isinstance(output.samples, list)
    assert output.samples[0].metadata == {"evaluation": True}


@pytest.mark.parametrize("selector", ["miles_generators.agentic.generate", "agentic", "miles-plugins:agentic"])
def test_a_plugin_or_a_dotted_path(selector: str) -> None:
    assert callable(load_generate_function(selector))


async def test_the_older_form_whose_last_argument_has_another_name() -> None:
    async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any], is_eval: bool) -> Sample:
        sample.metadata = {"evaluation": is_eval}
        return sample

    assert (await load_generate_function(generate)(given())).as_list()[0].metadata == {"evaluation": True}


async def test_the_older_form_with_evaluation_by_keyword() -> None:
    async def generate(args: Any, sample: Sample, sampling_params: Any, *, evaluation: bool) -> Sample:
        sample.metadata = {"evaluation": evaluation}
        return sample

    assert (await load_generate_function(generate)(given())).as_list()[0].metadata == {"evaluation": True}


async def test_a_class_of_the_older_form_in_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_generators.py").write_text(
        "class Generate:\n"
        "    def add_arguments(self, parser):\n        parser.add_argument('--theirs')\n"
        "    async def __call__(self, args, sample, sampling_params):\n"
        "        sample.metadata = {'args': args}\n        return sample\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    generate = load_generate_function("their_generators.Generate")
    assert hasattr(generate, "add_arguments")
    assert (await generate(given())).as_list()[0].metadata == {"args": "the args"}


def test_a_class_that_needs_arguments_is_named() -> None:
    class Needy:
        def __init__(self, model: str) -> None: ...

    with pytest.raises(PluginLoadError, match=r"Needy cannot be instantiated without arguments: .*'model'"):
        load_generate_function(Needy)


async def test_a_function_that_is_not_async_is_named() -> None:
    def generate(input: GenerateFnInput) -> GenerateFnOutput:
        return GenerateFnOutput(input.sample)

    with pytest.raises(PluginLoadError, match=r"generate returned a GenerateFnOutput, which cannot be awaited\n"):
        await load_generate_function(generate)(given())


class Plain:
    def __call__(self, input: GenerateFnInput) -> Any:
        return new_form(input)


@pytest.mark.parametrize(
    "source",
    [
        functools.partial(new_form),
        functools.partial(older_form),
        Plain,
        Plain(),
        lambda input: new_form(input),
        lambda args, sample, sampling_params: older_form(args, sample, sampling_params),
        lambda input: asyncio.to_thread(lambda: GenerateFnOutput(input.sample)),
    ],
)
async def test_what_returns_an_awaitable_is_a_generate_function(source: Any) -> None:
    input = given()
    assert (await load_generate_function(source)(input)).samples is input.sample


def test_add_arguments_is_kept() -> None:
    async def generate(input: GenerateFnInput) -> GenerateFnOutput:
        return GenerateFnOutput(input.sample)

    flags = lambda parser: None  # noqa: E731
    generate.add_arguments = flags  # type: ignore[attr-defined]
    assert load_generate_function(generate).add_arguments is flags  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", ["nothing", "no_such_module.generate", "miles_generators.agentic.genrate"])
def test_a_wrong_path_is_named(path: str) -> None:
    with pytest.raises(MilesError, match=f"generate function '{path}'"):
        load_generate_function(path)


def test_neither_form() -> None:
    async def generate(one: Any, two: Any) -> None: ...

    with pytest.raises(MilesError, match="neither form") as raised:
        load_generate_function(generate)
    assert "write generate(input), or generate(args, sample, sampling_params[, evaluation])" in raised.value.message


@pytest.mark.parametrize("result", [None, [], [1], "text", GenerateFnOutput([])])
async def test_a_wrong_result_is_named(result: Any) -> None:
    async def generate(input: GenerateFnInput) -> Any:
        return result

    with pytest.raises(PluginContractError, match=r"returned .*; expected a Sample"):
        await load_generate_function(generate)(given())
