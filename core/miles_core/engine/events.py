"""Server-sent events, read as their bytes come."""

from __future__ import annotations

from collections.abc import Sequence


class EventReader:
    """Bytes to the `data` of events; comments, names and ids of events are left out.

    Lines end in LF, CR LF or CR. An event that the stream breaks off in is none.
    """

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        """What has come of the line that is not whole: in parts, since a line may be of many megabytes."""
        self._half_end = False
        """Whether the last byte was a CR, which an LF may follow."""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that these bytes complete; data of several lines has LF between them."""
        if not piece:
            return []
        text = piece[1:] if self._half_end and piece.startswith(b"\n") else piece
        self._half_end = piece.endswith(b"\r")
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        first, *others = text.split(b"\n")
        self._rest.append(first)
        if not others:
            return []
        lines = [b"".join(self._rest), *others[:-1]]
        self._rest = [others[-1]]
        return self._read(lines)

    def _read(self, lines: Sequence[bytes]) -> list[bytes]:
        events: list[bytes] = []
        for line in lines:
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
        return events
