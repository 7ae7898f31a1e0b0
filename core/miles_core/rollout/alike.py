"""Notice that rollouts fail in a row, all in the same way, which more of them will not mend."""

from __future__ import annotations

import re
import time

from miles_core.errors import MilesError

_VARIES = re.compile(r"0x[0-9a-f]+|[0-9a-f]{8,}|\d+", re.IGNORECASE)
"""What differs between two texts of one error: ids, addresses, numbers."""


class RolloutFailed(MilesError):
    """A rollout ended without anything to keep; the message says why."""


class Alike:
    """Counts failures in a row that are all the same; a success, or another error, begins anew.

    `limit` of them stop the run; None never does. Once something has succeeded, those that had begun before the first
    of the row failed are not counted: whatever hits all that are under way together may be over.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._works = False
        self._since = 0.0
        self._stop: RolloutFailed | None = None
        self.count = 0
        self.text = ""
        """The first failure of the row, as it was recorded."""

    def succeeded(self) -> None:
        """Something works: the row ends."""
        self._works, self.count = True, 0

    def failed(self, text: str, began: float = 0.0) -> None:
        """Take in the failure of a rollout that began then, by `time.monotonic`."""
        if self.count == 0 or kind(text) != kind(self.text):
            self.count, self.text, self._since = 1, text, time.monotonic()
        elif began >= self._since or not self._works:
            self.count += 1
        if self.count == self._limit and self._stop is None:
            self._stop = RolloutFailed(
                f"{self.count} rollouts in a row failed with the same error: {self.text}\n"
                "  so no more were begun; the same command tries again, and --stop-after-failures 0 never stops early"
            )

    def check(self) -> None:
        """Raise RolloutFailed where more rollouts would only fail like the last ones."""
        if self._stop is not None:
            raise self._stop


def kind(text: str) -> str:
    """The text without what differs from rollout to rollout."""
    return _VARIES.sub("#", text)
