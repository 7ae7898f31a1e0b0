"""Starting the engine of a chosen plugin."""

from __future__ import annotations

from miles_core.engine.base import Engine, EngineConfig
from miles_core.errors import PluginContractError
from miles_core.plugins.plugin import Plugin


def launch(plugin: Plugin, config: EngineConfig) -> Engine:
    """The engine, when it answers. Raises PluginContractError if the plugin gives something else."""
    engine = plugin.call("launch_engine", config)
    if not isinstance(engine, Engine):
        raise PluginContractError(
            f"{plugin.describe()}: launch_engine returned {type(engine).__name__}, "
            "expected an engine with urls, alive() and close()"
        )
    return engine
