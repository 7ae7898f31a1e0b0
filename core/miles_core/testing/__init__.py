"""Tools for testing plugins: the conformance kit, and fakes of what a plugin talks to. Nothing loads by itself.

The names below are public, as are the modules `fake_engine`, `fake_sessions` and `fake_tokenizer`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles_core.testing.conformance import conforms as conforms
    from miles_core.testing.conformance.report import Report as Report
    from miles_core.testing.fake_engine import FakeEngine as FakeEngine
    from miles_core.testing.fake_sessions import FakeSessions as FakeSessions
    from miles_core.testing.fake_tokenizer import byte_tokenizer as byte_tokenizer
    from miles_core.testing.fake_tokenizer import tokenizer_for as tokenizer_for
    from miles_core.testing.fake_tokenizer import write_checkpoint as write_checkpoint
    from miles_core.testing.trials.agent import AgentTrial as AgentTrial
    from miles_core.testing.trials.engine import EngineTrial as EngineTrial
    from miles_core.testing.trials.generator import GeneratorTrial as GeneratorTrial

_LAZY = {
    "AgentTrial": "miles_core.testing.trials.agent",
    "EngineTrial": "miles_core.testing.trials.engine",
    "FakeEngine": "miles_core.testing.fake_engine",
    "FakeSessions": "miles_core.testing.fake_sessions",
    "GeneratorTrial": "miles_core.testing.trials.generator",
    "Report": "miles_core.testing.conformance.report",
    "byte_tokenizer": "miles_core.testing.fake_tokenizer",
    "conforms": "miles_core.testing.conformance",
    "tokenizer_for": "miles_core.testing.fake_tokenizer",
    "write_checkpoint": "miles_core.testing.fake_tokenizer",
}

__all__ = [
    "AgentTrial",
    "EngineTrial",
    "FakeEngine",
    "FakeSessions",
    "GeneratorTrial",
    "Report",
    "byte_tokenizer",
    "conforms",
    "tokenizer_for",
    "write_checkpoint",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use: a family's test needs no HTTP."""
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'miles_core.testing' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(module), name)
    globals()[name] = value
    return value
