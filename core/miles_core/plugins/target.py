"""What an entry point's value looks like: `module`, or `module:attribute`, and maybe `[extras]`."""

from __future__ import annotations

import re

TARGET = re.compile(
    r"(?P<module>[^\W\d]\w*(?:\.[^\W\d]\w*)*)"
    r"\s*(?::\s*(?P<attribute>[^\W\d]\w*(?:\.[^\W\d]\w*)*))?"
    r"\s*(?:\[(?P<extras>[^\]]*)\])?\s*"
)
"""The whole value, spaces and all."""
