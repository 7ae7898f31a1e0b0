"""The settings of a session server, checked when it starts."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from miles_core.errors import ConfigError
from miles_core.server.board import MOST


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How a session server runs. `port` 0 takes a free port; `max_sessions` and `max_concurrent` 0 mean no limit."""

    checkpoint: str
    tito_model: str
    engine_urls: tuple[str, ...]
    message_matcher: str = "strict"
    host: str = "127.0.0.1"
    port: int = 0
    history: str = "linear"
    max_rollback: int = 1
    pick_samples: str = "drop_retries"
    postprocess_samples: str = "shared_prefix_mask"
    chat_template_path: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    api_key: str | None = None
    engine_api_key: str | None = None
    engine_health_seconds: float = 5.0
    """Between two checks of an engine's health; 0 makes none."""
    admin_api_key: str | None = None
    public_url: str | None = None
    max_body_mb: float = 64.0
    max_sessions: int = 0
    max_concurrent: int = 0
    max_seq_len: int | None = None
    routing_replay: bool = False
    indexer_replay: bool = False
    incremental_replay: bool = False
    lora_path: str | None = None
    reject_control_tokens: bool = False
    on_tools_change: str = "keep"
    strict_template: bool = False
    keepalive_seconds: float = 15.0
    exact_weight_versions: bool = False
    """Whether every turn is to have the weight versions of its tokens, which only whole answers say."""
    workers: int = 1
    """Processes behind the port, for a server in the foreground; one in a thread is always one."""

    def __post_init__(self) -> None:
        """Raise ConfigError naming the setting that is wrong."""
        if self.history not in ("linear", "tree"):
            raise ConfigError(f"--history {self.history}: expected linear or tree")
        if self.on_tools_change not in ("keep", "refuse"):
            raise ConfigError(f"--on-tools-change {self.on_tools_change}: expected keep or refuse")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port}: expected a number from 0 to 65535")
        if self.max_rollback < 0:
            raise ConfigError(f"--max-rollback {self.max_rollback}: expected 0 or more")
        if self.incremental_replay and not self.routing_replay:
            raise ConfigError("--incremental-replay needs --use-rollout-routing-replay")
        for name, value in (("--max-sessions", self.max_sessions), ("--max-concurrent", self.max_concurrent)):
            if value < 0:
                raise ConfigError(f"{name} {value}: expected 0 (no limit) or more")
        if self.max_seq_len is not None and self.max_seq_len < 1:
            raise ConfigError(f"--max-seq-len {self.max_seq_len}: expected 1 or more")
        if not 1 <= self.workers <= MOST:
            raise ConfigError(f"--workers {self.workers}: expected a number of processes from 1 to {MOST}")
        if self.workers > 1 and sys.platform != "linux":
            raise ConfigError(
                f"--workers {self.workers} needs Linux (this is {sys.platform}), whose processes can hand over "
                "connections; run one process"
            )
        if not 0 <= self.engine_health_seconds < float("inf"):
            raise ConfigError(f"--engine-health-seconds {self.engine_health_seconds}: expected 0 (none) or more")
        if self.admin_api_key is not None and self.admin_api_key in (self.api_key, ""):
            raise ConfigError(
                "--admin-api-key must be a key of its own, since agents may hold --api-key; it is empty or the same"
            )
        if self.max_body_mb <= 0:
            raise ConfigError(f"--max-body-mb {self.max_body_mb}: expected more than 0")
        for url in self.engine_urls:
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"--engine {url}: an engine URL begins with http:// or https://")
