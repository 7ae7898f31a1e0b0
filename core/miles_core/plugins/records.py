"""What is known of a plugin, or of a fault in the metadata, without importing anything."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

BUILTIN_DISTRIBUTION = "miles-plugins"
"""The distribution whose plugins keep their bare names."""


class State(StrEnum):
    """What became of a plugin; the values are what `list` prints."""

    FOUND = "found"
    LOADED = "loaded"
    FAILED = "failed"
    DISABLED = "disabled"
    SHADOWED = "shadowed"
    CONFLICT = "conflict"


@dataclass
class PluginRecord:
    """One entry point, or one dotted path given on the command line (which has no distribution).

    `error` says why the plugin cannot be used by its bare name, or at all; `advice` what to do about it.
    `hooks` is empty until the plugin is loaded. `location` is the directory of its metadata. `bare` is
    whether it may be chosen, or is one of those to choose from, by its name alone.
    """

    kind: str
    name: str
    distribution: str
    version: str
    target: str
    extras: tuple[str, ...] = ()
    state: State = State.FOUND
    error: str | None = None
    advice: str | None = None
    hooks: tuple[str, ...] = ()
    builtin: bool = False
    location: str = ""
    bare: bool = True

    @property
    def selector(self) -> str:
        """The text that always chooses this plugin: `dist:name`, or the dotted path."""
        return f"{self.distribution}:{self.name}" if self.distribution else self.name

    def describe(self) -> str:
        """Kind, name, distribution and version, as messages say it: `family qwen3 of miles-plugins 0.1.0`."""
        if not self.distribution:
            return f"{self.kind} {self.name}"
        return f"{self.kind} {self.name} of {self.distribution} {self.version}".rstrip()

    def place(self) -> str:
        """`describe()` and the target: `family qwen3 of acme 0.4 (acme.qwen3)`."""
        return f"{self.describe()} ({self.target})" if self.distribution else self.describe()

    def mark(self, state: State, what: str, advice: str) -> None:
        """Note a state that needs explaining; `what` goes on the sentence that `place()` starts."""
        self.state = state
        self.error = f"{self.place()} {what}"
        self.advice = advice


@dataclass(frozen=True)
class Problem:
    """Something in the metadata that could not be read: where, what, and what to do next.

    `lost` is true if plugins may be missing from the list because of it.
    """

    where: str
    what: str
    advice: str
    lost: bool = True
