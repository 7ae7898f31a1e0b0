"""The plugins that SGLang is started with: the family, and what `--plugin` names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles_core.tito import TitoFamily

if TYPE_CHECKING:
    from miles_core.plugins import Plugin, Registry

HOOK = "configure_sglang"


@dataclass(frozen=True)
class Chosen:
    """The family, and those of the chosen plugins that configure SGLang, each once."""

    family: TitoFamily
    plugins: Sequence[Plugin]

    @property
    def parsers(self) -> str:
        """The parsers, in words."""
        names = {"reasoning": self.family.reasoning_parser, "tool calls": self.family.tool_call_parser}
        text = ", ".join(f"{what} by {name}" for what, name in names.items() if name)
        return text or "no parsers of the family's"


def chosen(tito_model: str, selectors: Sequence[str]) -> Chosen:
    """Load them. Raises PluginNotFound, PluginLoadError, or ConfigError where a plugin has nothing for SGLang."""
    from miles_core.errors import ConfigError
    from miles_core.plugins import Registry
    from miles_core.plugins.families import family_of

    registry = Registry.discover()
    family = registry.load("family", tito_model)
    plugins = [family] if family.has(HOOK) else []
    for selector in selectors:
        plugin = _either(registry, selector)
        if not plugin.has(HOOK):
            raise ConfigError(f"--plugin {selector}: {plugin.describe()} has no {HOOK}; nothing of it concerns SGLang")
        if all(plugin.record is not other.record for other in plugins):
            plugins.append(plugin)
    return Chosen(family_of(family), plugins)


def _either(registry: Registry, selector: str) -> Plugin:
    """An engine plugin of that name, or a family. Raises PluginNotFound about engines if there is neither."""
    from miles_core.errors import PluginNotFound

    try:
        return registry.load("engine", selector)
    except PluginNotFound:
        try:
            return registry.load("family", selector)
        except PluginNotFound:
            pass
        raise
