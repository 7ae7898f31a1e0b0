"""The kinds of plugin: the entry-point group, the hooks and the command-line flag of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

GROUP_PREFIX = "miles."
"""How every entry-point group of ours starts."""


@dataclass(frozen=True)
class Kind:
    """One kind of plugin; `main_hook` is what a plain function stands for, None where that is unclear."""

    name: str
    group: str
    main_hook: str | None
    hooks: tuple[str, ...]
    flag: str


_KINDS = (
    Kind("family", "miles.tito_families", "tito_family", ("tito_family", "configure_sglang"), "--tito-model"),
    Kind("agent", "miles.agents", "run_agent", ("run_agent", "abort", "add_arguments", "configure_agent"), "--agent"),
    Kind("generator", "miles.generators", "generate", ("generate", "add_arguments"), "--generate"),
    Kind("matcher", "miles.matchers", "message_matches", ("message_matches", "message_key"), "--message-matcher"),
    Kind("engine", "miles.engines", "launch_engine", ("launch_engine", "configure_sglang"), "--engine"),
    Kind(
        "sample-hook",
        "miles.sample_hooks",
        None,
        ("pick_samples", "postprocess_samples", "keep_group"),
        "--sample-hook",
    ),
)

KINDS: Mapping[str, Kind] = MappingProxyType({kind.name: kind for kind in _KINDS})
"""Every kind by name, in the order in which they are listed."""

KIND_OF_GROUP: Mapping[str, Kind] = MappingProxyType({kind.group: kind for kind in _KINDS})
"""Every kind by its entry-point group."""

MAY_LACK_MAIN_HOOK = frozenset({"engine"})
"""Kinds whose plugins are of use without the main hook: `--plugin` loads one that only configures SGLang."""
