"""Token-exact sessions between chat agents and inference engines.

The names below are what plugins and trainers may import; everything else is internal. Heavy libraries are
imported where they are used, never by this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles_core._version import __version__
from miles_core.errors import MilesError

if TYPE_CHECKING:
    from miles_core.engine.base import Engine as Engine
    from miles_core.engine.base import EngineConfig as EngineConfig
    from miles_core.hookspecs import CONTRACT_VERSIONS as CONTRACT_VERSIONS
    from miles_core.hookspecs import hookimpl as hookimpl
    from miles_core.types import GenerateFnInput as GenerateFnInput
    from miles_core.types import GenerateFnOutput as GenerateFnOutput
    from miles_core.types import Message as Message
    from miles_core.types import Sample as Sample

_LAZY = {
    "CONTRACT_VERSIONS": "miles_core.hookspecs",
    "Engine": "miles_core.engine.base",
    "EngineConfig": "miles_core.engine.base",
    "GenerateFnInput": "miles_core.types",
    "GenerateFnOutput": "miles_core.types",
    "Message": "miles_core.types",
    "Sample": "miles_core.types",
    "hookimpl": "miles_core.hookspecs",
}

__all__ = [
    "CONTRACT_VERSIONS",
    "Engine",
    "EngineConfig",
    "GenerateFnInput",
    "GenerateFnOutput",
    "Message",
    "MilesError",
    "Sample",
    "__version__",
    "hookimpl",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import miles_core` stays under 50 ms."""
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'miles_core' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(module), name)
    globals()[name] = value
    return value
