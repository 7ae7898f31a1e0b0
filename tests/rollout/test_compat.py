"""Modules written for miles, run where miles is not installed."""

from __future__ import annotations

import base64
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from helpers.fake_generate import FakeGenerate, reply, serving_in_thread, state_of
from miles_core.cli import main
from miles_core.errors import ConfigError, EngineError
from miles_core.rollout import compat, http
from miles_core.types import GenerateFnInput, Sample, SampleStatus

DATA = Path(__file__).parents[1] / "data" / "for_miles"
TINY = Path(__file__).parents[2] / "examples" / "tiny"


@pytest.fixture
def names() -> Iterator[None]:
    """miles' names, importable while the test runs."""
    with compat.enabled() as real:
        assert real is None
        yield


@pytest.fixture
def engine() -> Iterator[FakeGenerate]:
    fake = FakeGenerate()
    with serving_in_thread(fake):
        yield fake


def rollout(engine: FakeGenerate, folder: Path, *more: str) -> Result:
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "Add 1"}\n{"prompt": "Add 2"}\n')
    command = ["rollout", "--prompts", str(prompts), "--output", str(folder / "out"), "--tito-model", "qwen3"]
    command += ["--engine", engine.url, "--model", str(TINY / "model"), "--no-progress", *more]
    return CliRunner().invoke(main, command)


def samples(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out" / "samples.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("miles.utils.types", "Sample"),
        ("miles.utils.http_utils", "post"),
        ("miles.utils.http_utils", "get"),
        ("miles.utils.misc", "load_function"),
        ("miles.utils.processing_utils", "load_tokenizer"),
        ("miles.rollout.base_types", "GenerateFnInput"),
        ("miles.rollout.base_types", "GenerateFnOutput"),
        ("miles.rollout.base_types", "RolloutFnTrainInput"),
        ("miles.rollout.base_types", "RolloutFnEvalInput"),
        ("miles.rollout.base_types", "RolloutFnTrainOutput"),
        ("miles.rollout.base_types", "RolloutFnEvalOutput"),
        ("miles.rollout.base_types", "RolloutFnConstructorInput"),
        ("miles.rollout.inference_rollout.compatibility", "load_generate_function"),
        ("miles.rollout.generate_utils.generate_endpoint_utils", "compute_prompt_ids_from_sample"),
        ("miles.rollout.generate_utils.generate_endpoint_utils", "compute_request_payload"),
        ("miles.rollout.generate_utils.generate_endpoint_utils", "update_sample_from_response"),
        ("miles.rollout.sglang_rollout", "GenerateState"),
        ("miles.rollout.sglang_rollout", "generate"),
        ("miles.rollout.generate_hub.single_turn", "generate"),
        ("miles.rollout.generate_hub.multi_turn", "generate"),
        ("miles.rollout.generate_hub.agentic_tool_call", "generate"),
        ("miles.rollout.generate_hub.benchmarkers", "generate_with_random_osl"),
        ("miles.rollout.session.v2.picker_hub", "drop_retries"),
        ("miles.rollout.session.v2.postprocessor_hub", "default_postprocess"),
    ],
)
def test_every_name_is_there(names: None, module: str, name: str) -> None:
    assert callable(getattr(importlib.import_module(module), name))
    scope: dict[str, Any] = {}
    exec(f"import {module}\nfrom {module} import {name}", scope)
    assert callable(scope[name])


def test_names_are_gone_afterwards_and_there_again() -> None:
    for _ in range(2):
        with compat.enabled():
            assert importlib.import_module("miles.utils.types").Sample is Sample
        assert not [name for name in sys.modules if name.partition(".")[0] == "miles"]
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("miles.utils.types")


def test_what_is_missing_is_named(names: None) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"no module miles\.utils\.typs; did you mean miles\.utils\.types\?"):
        importlib.import_module("miles.utils.typs")
    with pytest.raises(AttributeError, match=r"no miles\.utils\.types\.Sampel; it has Sample"):
        _ = importlib.import_module("miles.utils.types").Sampel


@pytest.mark.parametrize("kind", ["package", "namespace"])
def test_a_real_miles_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    (tmp_path / "miles" / "utils").mkdir(parents=True)
    (tmp_path / "miles" / "utils" / "types.py").write_text("Sample = 'theirs'")
    if kind == "package":
        (tmp_path / "miles" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with compat.enabled() as real:
        assert real is not None
        assert str(tmp_path) in real
        try:
            assert importlib.import_module("miles.utils.types").Sample == "theirs"
        finally:
            for name in [name for name in sys.modules if name.partition(".")[0] == "miles"]:
                del sys.modules[name]


def test_a_folder_that_happens_to_be_called_miles_is_not_the_real_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "miles").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with compat.enabled() as real:
        assert real is None
        assert importlib.import_module("miles.utils.types").Sample is Sample


def test_the_command_says_that_the_real_one_is_used(
    engine: FakeGenerate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site" / "miles").mkdir(parents=True)
    (tmp_path / "site" / "miles" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "site")
    engine.script = [reply([5, 6])] * 2
    result = rollout(engine, tmp_path, "--generate", "single_turn", "--compat", "miles")
    assert result.exit_code == 0, result.output
    assert "--compat miles: the real miles is installed" in result.stderr


def test_a_module_of_the_older_form_runs_unchanged(
    engine: FakeGenerate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(DATA)
    monkeypatch.delitem(sys.modules, "older_generate", raising=False)
    engine.script = [reply([5, 6, 7]), reply([8, 9], "length")]
    flags = ("--generate", "older_generate.generate", "--compat", "miles")
    result = rollout(engine, tmp_path, *flags, "--their-style", "bold", "--concurrency", "1", "--max-tokens", "9")
    assert result.exit_code == 0, result.output
    first, second = samples(tmp_path)
    assert (first["tokens"][-2:], first["response_length"], first["loss_mask"]) == ([5, 6], 2, [1, 1])
    assert (second["status"], second["metadata"]["style"]) == ("truncated", "bold")
    assert engine.requests[0]["sampling_params"]["max_new_tokens"] == 9
    shown = CliRunner().invoke(main, ["rollout", "--help", *flags])
    assert "--their-style" in shown.stdout


def test_a_module_of_the_newer_form_runs_unchanged(
    engine: FakeGenerate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(DATA)
    monkeypatch.delitem(sys.modules, "newer_generate", raising=False)
    engine.script = [reply([5, 6])] * 2
    flags = ("--generate", "newer_generate.generate", "--compat", "miles")
    result = rollout(engine, tmp_path, *flags, "--concurrency", "1")
    assert result.exit_code == 0, result.output
    for sample, sent in zip(samples(tmp_path), engine.requests, strict=True):
        assert sample["tokens"] == [*sent["input_ids"], 5, 6]
        assert (sample["loss_mask"], sample["status"]) == ([1, 1], "completed")


def test_prompts_as_text_are_what_the_family_renders(engine: FakeGenerate, tmp_path: Path) -> None:
    engine.script = [reply([5, 6])] * 4
    (tmp_path / "text").mkdir()
    (tmp_path / "messages").mkdir()
    for folder, more in (("text", ["--apply-chat-template"]), ("messages", [])):
        result = rollout(engine, tmp_path / folder, "--generate", "single_turn", "--concurrency", "1", *more)
        assert result.exit_code == 0, result.output
    assert samples(tmp_path / "text")[0]["prompt"].startswith("<|im_start|>user\nAdd 1<|im_end|>")
    sent = [request["input_ids"] for request in engine.requests]
    assert sent[:2] == sent[2:]


def test_without_compat_the_missing_module_is_named(
    engine: FakeGenerate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(DATA)
    monkeypatch.delitem(sys.modules, "newer_generate", raising=False)
    result = rollout(engine, tmp_path, "--generate", "newer_generate.generate")
    assert result.exit_code == 1
    assert "No module named 'miles'" in result.stderr
    assert "stand in for it with --compat miles" in result.stderr


def test_without_compat_a_path_of_miles_asks_for_it(engine: FakeGenerate, tmp_path: Path) -> None:
    result = rollout(engine, tmp_path, "--generate", "miles.rollout.generate_hub.single_turn.generate")
    assert result.exit_code == 1
    assert "there is no module 'miles'\n  install miles, or let miles-plugins rollout or serve stand" in result.stderr


@pytest.mark.parametrize(
    ("path", "plugin"),
    [
        ("miles.rollout.generate_hub.single_turn.generate", "single_turn"),
        ("miles.rollout.sglang_rollout.generate", "single_turn"),
        ("miles.rollout.generate_hub.benchmarkers.generate_with_random_osl", "random_length"),
    ],
)
def test_dotted_defaults_are_the_built_ins(engine: FakeGenerate, tmp_path: Path, path: str, plugin: str) -> None:
    engine.script = [reply([5, 6])] * 2
    result = rollout(engine, tmp_path, "--custom-generate-function-path", path, "--compat", "miles")
    assert result.exit_code == 0, result.output
    assert f"generator {plugin} of miles-plugins" in result.stderr


def test_the_agentic_default_needs_an_agent(engine: FakeGenerate, tmp_path: Path) -> None:
    path = "miles.rollout.generate_hub.agentic_tool_call.generate"
    result = rollout(engine, tmp_path, "--custom-generate-function-path", path, "--compat", "miles")
    assert (result.exit_code, "--generate agentic needs an agent" in result.stderr) == (2, True)


async def test_a_generate_function_of_miles_called_by_another(names: None) -> None:
    from miles.rollout.sglang_rollout import (  # type: ignore[import-not-found]  # made by --compat
        GenerateState,
        generate,
    )

    async with FakeGenerate().serving() as engine:
        state = state_of(engine.url)
        with compat.current.running(state):
            assert GenerateState(state.args) is state
            sample = await generate(state.args, Sample(prompt="x"), {})
    assert sample.status is SampleStatus.COMPLETED


async def test_helpers_of_the_endpoint(names: None) -> None:
    helpers = importlib.import_module("miles.rollout.generate_utils.generate_endpoint_utils")
    args = SimpleNamespace(rollout_max_context_len=10, use_rollout_routing_replay=True, num_layers=2)
    payload, halt = helpers.compute_request_payload(args, [1] * 7, {"max_new_tokens": 9}, {"images": ["http://x"]})
    assert (payload["sampling_params"], payload["image_data"], halt) == ({"max_new_tokens": 3}, ["http://x"], None)
    assert payload["return_routed_experts"] is True
    assert helpers.compute_request_payload(args, [1] * 10, {}) == (None, SampleStatus.TRUNCATED)
    sample = Sample(prompt="x")
    experts = base64.b64encode(np.arange(16, dtype=np.int32).tobytes()).decode()
    output = reply([5, 6], routed_experts=experts)
    await helpers.update_sample_from_response(args, sample, payload, output)
    assert (sample.tokens, sample.response_length, sample.loss_mask) == ([1] * 7 + [5, 6], 2, None)
    assert sample.rollout_routed_experts.shape == (8, 2, 1)
    sample.rollout_routed_experts = None
    again = {**payload, "input_ids": sample.tokens}
    await helpers.update_sample_from_response(SimpleNamespace(), sample, again, reply([7]), update_loss_mask=True)
    assert (sample.tokens[-3:], sample.rollout_log_probs) == ([5, 6, 7], [-1 / 64, -2 / 64, -1 / 64])


async def test_post_tries_again_and_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from miles_core.rollout.compat.functions import post

    monkeypatch.setattr(http, "FIRST_DELAY", 0.0)
    async with FakeGenerate().serving() as engine:
        engine.script = [503, 500, reply([5])]
        assert (await post(f"{engine.url}/generate", {}))["output_ids"] == [5]
        engine.script = [503] * 3
        with pytest.raises(EngineError, match="503: scripted 503"):
            await post(f"{engine.url}/generate", {}, max_retries=1)
        assert len(engine.requests) == 5
        engine.script = [404]
        with pytest.raises(EngineError, match="404"):
            await post(f"{engine.url}/generate", {})
        assert engine.requests[-1] == {}


def test_a_function_that_is_not_there_is_named(names: None) -> None:
    load = importlib.import_module("miles.utils.misc").load_function
    assert load("json.dumps") is json.dumps
    with pytest.raises(ConfigError, match=r"'json\.dump_s' cannot be loaded"):
        load("json.dump_s")


async def test_the_input_of_miles_is_ours(names: None) -> None:
    given = importlib.import_module("miles.rollout.base_types").GenerateFnInput(
        state=SimpleNamespace(args=1), sample=Sample(), sampling_params={}, evaluation=False
    )
    assert isinstance(given, GenerateFnInput)
    assert given.args == 1


def test_a_class_that_gives_siblings_runs_unchanged(
    engine: FakeGenerate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(DATA)
    monkeypatch.delitem(sys.modules, "class_generate", raising=False)
    engine.script = [reply([5, 6, 7])] * 4
    flags = ["--generate", "class_generate.generate", "--compat", "miles", "--best-of", "2", "--reward-key", "score"]
    result = rollout(engine, tmp_path, *flags)
    assert result.exit_code == 0, result.output
    found = samples(tmp_path)
    assert sorted((each["prompt_index"], each["leaf_index"]) for each in found) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for each in found:
        assert (each["reward"], each["rollout_id"], each["loss_mask"]) == (
            {"score": 3.0, "turns": 1.0},
            each["index"],
            [1] * 3,
        )
        assert each["metadata"]["shouted"] == each["response"].upper()
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["reward"]["count"], summary["reward"]["mean"], summary["rollouts"]) == (2, 3.0, 2)


@pytest.mark.parametrize("continuous", ["", "1"])
def test_a_loop_of_its_own_runs_unchanged_in_both_schedulers(
    engine: FakeGenerate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, continuous: str
) -> None:
    monkeypatch.syspath_prepend(DATA)
    monkeypatch.setenv("MILES_EXPERIMENTAL_ROLLOUT_REFACTOR", continuous)
    monkeypatch.delitem(sys.modules, "own_loop", raising=False)
    engine.script = [reply([5, 6])] * 4
    flags = ["--generate", "own_loop.generate", "--compat", "miles", "--own-turns", "2", "--apply-chat-template"]
    result = rollout(engine, tmp_path, *flags)
    assert result.exit_code == 0, result.output
    for each in samples(tmp_path):
        mask = each["loss_mask"]
        assert (mask[:2], mask[-2:], 0 in mask) == ([1, 1], [1, 1], True)
        assert len(mask) == len(each["rollout_log_probs"]) == each["response_length"]


async def test_a_reply_that_does_not_go_on_from_the_sample_is_refused(names: None) -> None:
    """A module that renders the prompt anew for a partial sample would train on tokens out of place."""
    helpers = importlib.import_module("miles.rollout.generate_utils.generate_endpoint_utils")
    partial = Sample(index=3, tokens=[1, 2, 3], response_length=1, loss_mask=[1], rollout_log_probs=[-1.0])
    with pytest.raises(ValueError, match="sample 3 has 3 tokens, and the request did not go on from them"):
        await helpers.update_sample_from_response(SimpleNamespace(), partial, {"input_ids": [1, 2]}, reply([5]))
    await helpers.update_sample_from_response(SimpleNamespace(), partial, {"input_ids": [1, 2, 3]}, reply([5]))
    assert partial.tokens == [1, 2, 3, 5]
