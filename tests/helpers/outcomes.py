"""What reading JSON comes to, to compare two readers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson


def outcome(read: Callable[..., Any], raw: bytes, **how: int) -> tuple[bool, Any]:
    """Whether it is JSON, and what it says or why it is not."""
    try:
        return True, orjson.dumps(read(raw, **how))
    except orjson.JSONDecodeError as error:
        return False, str(error)
