"""Which names of miles there are, and what stands behind each; nothing is loaded before it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

Make = Callable[[], Any]


def _ours(module: str, name: str) -> Make:
    return lambda: getattr(import_module(f"miles_core.{module}"), name)


def _generator(name: str) -> Make:
    def make() -> Any:
        from miles_core.rollout.loader import load_generate_function

        return load_generate_function(name)

    return make


def _hook(plugin: str, hook: str) -> Make:
    def make() -> Any:
        from miles_core.plugins import Registry

        return Registry.discover().load("sample-hook", plugin).hook(hook)

    return make


_BASE_TYPES = (
    "RolloutFnConstructorInput", "RolloutFnEvalInput", "RolloutFnEvalOutput", "RolloutFnTrainInput",
    "RolloutFnTrainOutput",
)  # fmt: skip
_ENDPOINT = ("compute_prompt_ids_from_sample", "compute_request_payload", "update_sample_from_response")

MODULES: Mapping[str, Mapping[str, Make]] = {
    "miles.utils.types": {"Sample": _ours("types", "Sample")},
    "miles.utils.http_utils": {name: _ours("rollout.compat.functions", name) for name in ("get", "post")},
    "miles.utils.misc": {"load_function": _ours("rollout.compat.functions", "load_function")},
    "miles.utils.processing_utils": {
        name: _ours("rollout.compat.functions", name) for name in ("load_processor", "load_tokenizer")
    },
    "miles.rollout.base_types": {
        "GenerateFnInput": _ours("types", "GenerateFnInput"),
        "GenerateFnOutput": _ours("types", "GenerateFnOutput"),
        **{name: _ours("rollout.compat.base_types", name) for name in _BASE_TYPES},
    },
    "miles.rollout.inference_rollout.compatibility": {
        "load_generate_function": _ours("rollout.loader", "load_generate_function")
    },
    "miles.rollout.generate_utils.generate_endpoint_utils": {
        name: _ours("rollout.compat.functions", name) for name in _ENDPOINT
    },
    "miles.rollout.sglang_rollout": {
        "GenerateState": _ours("rollout.compat.functions", "GenerateState"),
        "generate": _ours("rollout.compat.functions", "generate"),
    },
    "miles.rollout.generate_hub.single_turn": {"generate": _generator("single_turn")},
    "miles.rollout.generate_hub.multi_turn": {"generate": _generator("multi_turn")},
    "miles.rollout.generate_hub.agentic_tool_call": {"generate": _generator("agentic")},
    "miles.rollout.generate_hub.benchmarkers": {"generate_with_random_osl": _generator("random_length")},
    "miles.rollout.session.v2.picker_hub": {"drop_retries": _hook("drop_retries", "pick_samples")},
    "miles.rollout.session.v2.postprocessor_hub": {
        "default_postprocess": _hook("shared_prefix_mask", "postprocess_samples")
    },
}
"""What each module has, and how it is made."""
