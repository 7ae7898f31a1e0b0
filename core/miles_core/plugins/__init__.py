"""Which plugins are installed, and how one is chosen, loaded, checked and called.

Listing reads metadata and imports no plugin; loading is by need. Every entry point becomes one record, and
nothing an installed package does can stop the program or hide another plugin. No other module of the
project reads entry points or touches pluggy's `PluginManager`.
"""

from __future__ import annotations

from miles_core.plugins.about import About, about
from miles_core.plugins.kinds import KINDS, Kind
from miles_core.plugins.plugin import Plugin
from miles_core.plugins.records import BUILTIN_DISTRIBUTION, PluginRecord, Problem, State
from miles_core.plugins.registry import Registry
from miles_core.plugins.selector import Selector

__all__ = [
    "BUILTIN_DISTRIBUTION",
    "KINDS",
    "About",
    "Kind",
    "Plugin",
    "PluginRecord",
    "Problem",
    "Registry",
    "Selector",
    "State",
    "about",
]
