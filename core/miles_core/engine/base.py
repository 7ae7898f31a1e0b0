"""What an engine plugin is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How to start an engine.

    `model` has the weights; `checkpoint` the tokenizer. `tito_model` is the family's selector. Port 0 asks
    for a free port. `options` are the engine's own flags, as text, in the order given
    (`("--max-batch", "8")`). `progress` is called with one line of text at a time while starting.
    """

    model: str
    checkpoint: str
    tito_model: str
    host: str = "127.0.0.1"
    port: int = 0
    log_file: Path | None = None
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    api_key: str | None = None
    start_timeout: float = 600.0
    """Seconds. An engine that writes a log while it loads may count from the last thing it wrote."""
    progress: Callable[[str], None] | None = None


@runtime_checkable
class Engine(Protocol):
    """A running engine: where it is, whether it lives, how to stop it."""

    @property
    def urls(self) -> tuple[str, ...]:
        """Base URLs of its workers, without a trailing slash; none if it serves as part of one elsewhere."""
        ...

    def alive(self) -> bool:
        """Whether it serves, or will again without our doing; False once it is over."""
        ...

    def close(self) -> None:
        """Stop it and every process it started; may be called twice."""
        ...
