"""Where miles is not installed: its names, backed by ours, so that modules written for it run unchanged.

`enabled()` makes `miles.utils.types`, `miles.rollout.base_types` and the like importable for as long as it is open;
`selector()` maps miles' own dotted defaults to our built-ins. A real miles that can be imported is never touched.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from miles_core.rollout.compat import current
from miles_core.rollout.compat.finder import Finder
from miles_core.rollout.state import RolloutState

BUILT_IN: Mapping[str, Mapping[str, str]] = {
    "generator": {
        "miles.rollout.generate_hub.single_turn.generate": "single_turn",
        "miles.rollout.generate_hub.multi_turn.generate": "multi_turn",
        "miles.rollout.generate_hub.agentic_tool_call.generate": "agentic",
        "miles.rollout.generate_hub.benchmarkers.generate_with_random_osl": "random_length",
        "miles.rollout.sglang_rollout.generate": "single_turn",
    },
    "sample-hook": {
        "miles.rollout.session.v2.picker_hub.drop_retries": "drop_retries",
        "miles.rollout.session.v2.postprocessor_hub.default_postprocess": "shared_prefix_mask",
    },
}
"""miles' dotted defaults and the built-in plugins that they mean, by kind."""


def selector(kind: str, name: str) -> str:
    """The plugin that a dotted default of miles means; any other selector as it is."""
    return BUILT_IN.get(kind, {}).get(name.strip(), name)


def real_miles() -> str | None:
    """Where the real miles is installed, if it can be imported; nothing of it is."""
    module = sys.modules.get("miles")
    if module is not None and isinstance(getattr(module.__spec__, "loader", None), Finder):
        return None
    try:
        spec = importlib.util.find_spec("miles")
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    # a mere folder of that name is importable too, as a namespace; the real one has code in it
    folders = [Path(place) for place in spec.submodule_search_locations or ()]
    if spec.origin or any((folder / "utils" / "types.py").is_file() for folder in folders):
        return spec.origin or str(folders[0])
    return None


@contextmanager
def enabled(state: RolloutState | None = None) -> Iterator[str | None]:
    """Make miles' names importable; yields where the real miles is, in which case nothing was done.

    `state` is the run's: what `GenerateState(args)` gives to modules that ask for it.
    """
    real = real_miles()
    if real is not None:
        yield real
        return
    finder = Finder()
    sys.meta_path.insert(0, finder)
    with current.running(state):
        try:
            yield None
        finally:
            sys.meta_path.remove(finder)
            for name in [name for name in sys.modules if name == "miles" or name.startswith("miles.")]:
                del sys.modules[name]
