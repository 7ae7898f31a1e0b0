"""What several commands do with the values of their flags."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from miles_core.errors import ConfigError

HISTORIES = {"linear": "linear", "tree": "tree", "v1": "linear", "v2": "tree"}
"""How a history may be named, older names included."""


def located(name: str) -> str:
    """A path as an absolute one, since an engine may start elsewhere; an id as it is."""
    return str(Path(name).resolve()) if Path(name).exists() else name


def template_kwargs(text: str | None) -> dict[str, Any]:
    """`--apply-chat-template-kwargs` as an object; none if it was not given. Raises ConfigError."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--apply-chat-template-kwargs {text}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(
            f'--apply-chat-template-kwargs {text}: not an object; for example {{"enable_thinking": false}}'
        )
    return value


def check_is_no_address(name: str) -> None:
    """`host:port` looks like `distribution:name`; no plugin is called by a number. Raises ConfigError."""
    if re.fullmatch(r"([\w.-]+|\[[0-9a-fA-F:.]+\]):\d+(/.*)?", name):
        raise ConfigError(f"--engine {name}: the URL of an engine begins with http://; did you mean http://{name}?")
