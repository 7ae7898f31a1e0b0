"""Notice that every rollout fails in the same way, which more of them will not mend."""

from __future__ import annotations

import re

from miles_core.errors import MilesError

_VARIES = re.compile(r"0x[0-9a-f]+|[0-9a-f]{8,}|\d+", re.IGNORECASE)
"""What differs between two texts of one error: ids, addresses, numbers."""


class RolloutFailed(MilesError):
    """A rollout ended without anything to keep; the message says why."""


class Alike:
    """Counts failures for as long as they are all the same and nothing succeeds; `limit` None never stops."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self.count = 0
        self.text: str | None = None
        """The first failure, while all are like it."""

    def succeeded(self) -> None:
        """Something works: failures are no longer watched."""
        self._limit, self.text = None, None

    def failed(self, text: str) -> None:
        """Take in a failure."""
        self.count += 1
        if self.count == 1:
            self.text = text
        elif self.text is None or kind(text) != kind(self.text):
            self.succeeded()

    def check(self) -> None:
        """Raise RolloutFailed where more rollouts would only fail like the first ones."""
        if self._limit is not None and self.text is not None and self.count >= self._limit:
            raise RolloutFailed(
                f"the first {self.count} rollouts all failed with the same error: {self.text}\n"
                "  so no more were begun; the same command tries again, and --stop-after-failures 0 never stops early"
            )


def kind(text: str) -> str:
    """The text without what differs from rollout to rollout."""
    return _VARIES.sub("#", text)
