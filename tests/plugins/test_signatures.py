"""Hook functions against their specs: what is adapted, and what is refused."""

from __future__ import annotations

import asyncio
import functools
import inspect
import types
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from miles_core.errors import PluginLoadError
from miles_core.plugins.signatures import adapted, generate_form


def refusal(hook: str, function: Callable[..., Any]) -> str:
    with pytest.raises(PluginLoadError) as caught:
        adapted(hook, function)
    return caught.value.message


def test_a_function_like_the_spec_is_left_as_it_is() -> None:
    async def run_agent(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any) -> None: ...

    assert adapted("run_agent", run_agent) is run_agent


async def test_an_agent_gets_by_name_what_it_takes() -> None:
    async def fewer(metadata: str, base_url: str) -> tuple[str, str]:
        return metadata, base_url

    hook = adapted("run_agent", fewer)
    assert await hook(base_url="u", prompt="p", request_kwargs="r", metadata="m") == ("m", "u")
    assert await hook("u", "p", "r", "m") == ("m", "u")
    assert inspect.iscoroutinefunction(hook)


async def test_an_agent_with_keyword_arguments_gets_them_all() -> None:
    async def every(base_url: str, **kwargs: str) -> tuple[str, dict[str, str]]:
        return base_url, kwargs

    given = adapted("run_agent", every)("u", "p", "r", "m")
    assert await given == ("u", {"prompt": "p", "request_kwargs": "r", "metadata": "m"})


async def test_positional_only_and_defaulted_arguments() -> None:
    async def agent(base_url: str, prompt: str, /, retries: int = 3, *, metadata: str) -> tuple[Any, ...]:
        return base_url, prompt, retries, metadata

    hook = adapted("run_agent", agent)
    assert await hook(base_url="u", prompt="p", request_kwargs="r", metadata="m") == ("u", "p", 3, "m")


async def test_bare_positional_arguments_get_them_all() -> None:
    async def agent(*args: str) -> tuple[str, ...]:
        return args

    assert await adapted("run_agent", agent)("u", "p", "r", "m") == ("u", "p", "r", "m")


def test_a_misspelled_argument_says_which_was_meant() -> None:
    async def agent(base_url: str, prompts: Any) -> None: ...

    assert refusal("run_agent", agent) == (
        "has a run_agent with an argument 'prompts' that the hook does not give"
        " (it gives base_url, prompt, request_kwargs and metadata)\n  did you mean prompt?"
    )


def test_an_argument_of_another_name_is_refused() -> None:
    def configure(x: Any) -> None: ...

    assert refusal("configure_sglang", configure) == (
        "has a configure_sglang with an argument 'x' that the hook does not give (it gives server_args)\n"
        "  give it a default, or leave it out"
    )


async def _answer(base_url: str, prompt: str) -> tuple[str, str]:
    return base_url, prompt


class _Calls:
    def __call__(self, base_url: str, prompt: str) -> Any:
        return _answer(base_url, prompt)


class _CallsAsync:
    async def __call__(self, base_url: str, prompt: str) -> Any:
        return await _answer(base_url, prompt)


class _Wraps:
    """A decorator that is a class."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _wrapped(function: Callable[..., Any], *, named: bool) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return functools.wraps(function)(wrapper) if named else wrapper


@types.coroutine
def _by_generator(base_url: str, prompt: str) -> Any:
    yield from _answer(base_url, prompt).__await__()
    return base_url, prompt


AWAITABLE: dict[str, Callable[..., Any]] = {
    "a partial of an async function": functools.partial(_answer, prompt="p"),
    "a partial of a plain one": functools.partial(_Calls(), prompt="p"),
    "an object whose call is async": _CallsAsync(),
    "an object whose call returns a coroutine": _Calls(),
    "a decorator with functools.wraps": _wrapped(_answer, named=True),
    "a decorator that is a class": _Wraps(_answer),
    "a lambda": lambda base_url, prompt: _answer(base_url, prompt),
    "a thread": lambda base_url, prompt: asyncio.to_thread(lambda: (base_url, prompt)),
    "a task": lambda base_url, prompt: asyncio.create_task(_answer(base_url, prompt)),
    "a coroutine made of a generator": _by_generator,
}


@pytest.mark.parametrize("form", AWAITABLE)
async def test_an_agent_is_whatever_can_be_awaited(form: str) -> None:
    hook = adapted("run_agent", AWAITABLE[form])
    assert await hook(base_url="u", prompt="p", request_kwargs="r", metadata="m") == ("u", "p")
    assert inspect.iscoroutinefunction(hook)


async def test_a_decorator_without_functools_wraps_gets_all_arguments() -> None:
    async def every(**kwargs: str) -> dict[str, str]:
        return kwargs

    hook = adapted("run_agent", _wrapped(every, named=False))
    assert await hook(base_url="u", prompt="p", request_kwargs="r", metadata="m") == {
        "base_url": "u", "prompt": "p", "request_kwargs": "r", "metadata": "m",
    }  # fmt: skip


async def test_an_agent_that_cannot_be_awaited_says_so_when_it_is_called() -> None:
    def run_agent(base_url: str) -> dict[str, str]:
        return {}

    with pytest.raises(PluginLoadError) as caught:
        await adapted("run_agent", run_agent)(base_url="u", prompt="p", request_kwargs="r", metadata="m")
    assert caught.value.message == (
        f"{__name__}.{run_agent.__qualname__} returned a dict, which cannot be awaited\n"
        "  write `async def`, or return the coroutine of what it calls; blocking code goes into asyncio.to_thread"
    )


class _Nothing:
    """A class in an agent's place: calling it makes an object, and gives no answer."""

    def __init__(self, base_url: str) -> None: ...


@functools.cache
def _cached(base_url: str) -> None: ...


@pytest.mark.parametrize(
    ("function", "name", "returned"),
    [
        (_Nothing, "_Nothing", "a _Nothing"),
        (functools.partial(_Nothing), "_Nothing", "a _Nothing"),
        (_cached, "_cached", "None"),
    ],
    ids=["class", "partial of a class", "cached"],
)
async def test_what_has_no_call_in_python_is_named_too(function: Any, name: str, returned: str) -> None:
    with pytest.raises(PluginLoadError) as caught:
        await adapted("run_agent", function)(base_url="u", prompt="p", request_kwargs="r", metadata="m")
    assert caught.value.message.startswith(f"{__name__}.{name} returned {returned}, which cannot be awaited\n")


def test_an_agent_that_yields_is_refused() -> None:
    async def run_agent(base_url: str) -> AsyncIterator[None]:
        yield

    assert refusal("run_agent", run_agent) == "has a run_agent that yields\n  return the result"


def test_an_async_matcher_is_refused() -> None:
    async def message_matches(stored: Any, replayed: Any) -> bool:
        return True

    assert refusal("message_matches", message_matches) == (
        "has an async message_matches, which is called without await\n  write a plain `def message_matches`"
    )


def test_a_function_whose_arguments_cannot_be_read_is_refused() -> None:
    assert "arguments cannot be read" in refusal("tito_family", type)


@pytest.mark.parametrize(
    "matcher",
    [
        lambda a, b: (a, b),
        lambda stored, other: (stored, other),
        lambda left, right, depth=3: (left, right),
        lambda replayed, stored: (stored, replayed),
        lambda *pair: pair,
        lambda **pair: (pair["stored"], pair["replayed"]),
    ],
)
def test_a_matcher_names_its_arguments_as_it_likes(matcher: Callable[..., Any]) -> None:
    hook = adapted("message_matches", matcher)
    assert hook(1, 2) == (1, 2)
    assert hook(stored=1, replayed=2) == (1, 2)


@pytest.mark.parametrize("matcher", [lambda message: True, lambda a, b, c: True, lambda a, stored: True])
def test_a_matcher_that_cannot_take_a_pair_is_refused(matcher: Callable[..., Any]) -> None:
    assert "that the hook does not give (it gives stored and replayed)" in refusal("message_matches", matcher)


async def _new(input: Any) -> None: ...
async def _new_own_name(given: Any, verbose: bool = False) -> None: ...
async def _older(args: Any, sample: Any, sampling_params: Any) -> None: ...
async def _older_evaluation(args: Any, sample: Any, sampling_params: Any, evaluation: bool = False) -> None: ...
async def _older_required(args: Any, sample: Any, sampling_params: Any, evaluation: bool) -> None: ...
async def _neither(args: Any, sample: Any) -> None: ...
async def _keyword(*, input: Any) -> None: ...
async def _input_and_more(given: Any, retries: int = 3, verbose: bool = False) -> None: ...
async def _input_named(input: Any = None, retries: int = 3, verbose: bool = False) -> None: ...
async def _older_named(args: Any = None, sample: Any = None, sampling_params: Any = None) -> None: ...
async def _older_open(args: Any, sample: Any, *rest: Any) -> None: ...
async def _older_keyword(args: Any, sample: Any, sampling_params: Any, *, evaluation: bool) -> None: ...
async def _anything(*args: Any, **kwargs: Any) -> None: ...
async def _all_optional(a: Any = None, b: Any = None, c: Any = None) -> None: ...
async def _one_and_sample(a: Any, sample: Any = None, c: Any = None) -> None: ...
async def _five(a: Any, b: Any, c: Any, d: Any, e: Any) -> None: ...
async def _nothing() -> None: ...


@pytest.mark.parametrize(
    ("function", "form"),
    [
        (_new, "input"),
        (_new_own_name, "input"),
        (_older, "args"),
        (_older_evaluation, "args"),
        (_older_required, "args"),
        (_input_and_more, "input"),
        (_input_named, "input"),
        (_older_named, "args"),
        (_older_open, "args"),
        (_older_keyword, "args"),
    ],
)
def test_both_forms_of_generate_are_kept(function: Callable[..., Any], form: str) -> None:
    assert generate_form(function) == form
    assert adapted("generate", function) is function


def test_a_generate_function_of_neither_form_is_refused() -> None:
    assert refusal("generate", _neither) == (
        "has generate(args, sample), which is neither form of a generate function\n"
        "  write generate(input), or generate(args, sample, sampling_params[, evaluation])"
    )
    assert refusal("generate", _keyword).startswith("has generate(input), which is neither form")


@pytest.mark.parametrize(
    ("function", "shown", "why"),
    [
        (_anything, "*args, **kwargs", "could be either form"),
        (_all_optional, "a, b, c", "could be either form"),
        (_one_and_sample, "a, sample, c", "could be either form"),
        (_five, "a, b, c, d, e", "is neither form"),
        (_nothing, "", "is neither form"),
    ],
)
def test_what_tells_no_form_is_refused_with_both(function: Callable[..., Any], shown: str, why: str) -> None:
    assert refusal("generate", function) == (
        f"has generate({shown}), which {why} of a generate function\n"
        "  write generate(input), or generate(args, sample, sampling_params[, evaluation])"
    )
