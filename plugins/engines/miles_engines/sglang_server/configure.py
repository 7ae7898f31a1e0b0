"""The plugins' `configure_sglang`, called inside an SGLang process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def configure(records: Sequence[Mapping[str, Any]], server_args: object) -> None:
    """Load the plugins that the launcher chose, in its order, and call their hook.

    Raises PluginLoadError or PluginContractError naming the plugin.
    """
    from miles_core.plugins import Registry
    from miles_core.plugins.records import PluginRecord

    registry = Registry([])
    for fields in records:
        plugin = registry.load_record(PluginRecord(**fields))
        plugin.call("configure_sglang", server_args)
