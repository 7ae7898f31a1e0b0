"""What a distribution says about itself: its summary and links, read with importlib_metadata when asked for."""

from __future__ import annotations

from dataclasses import dataclass

from miles_core.plugins.records import PluginRecord


@dataclass(frozen=True)
class About:
    """The parts of a distribution's metadata that help a person; empty where it has none, or unreadable ones."""

    summary: str = ""
    links: tuple[str, ...] = ()
    """As `label, URL`, in the order of the metadata."""


def about(record: PluginRecord) -> About:
    """The distribution of a plugin, in its own words. Whatever is wrong with the metadata gives less, not an error."""
    if not record.distribution or not record.location:
        return About()
    import importlib_metadata  # costs a quarter of what `list` may take, so only here

    try:
        found = next(iter(importlib_metadata.distributions(name=record.distribution, path=[record.location])), None)
        if found is None:
            return About()
        metadata = found.metadata
        links = [*(metadata.get_all("Project-URL") or []), *(metadata.get_all("Home-page") or [])]
        return About(str(metadata.get("Summary") or ""), tuple(map(str, links)))
    except Exception:
        return About()
