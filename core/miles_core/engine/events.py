"""Server-sent events, read as their bytes come."""

from __future__ import annotations


class EventReader:
    """Bytes to the `data` of events; comments, names and ids of events are left out.

    Lines end in LF, CR LF or CR. An event that the stream breaks off in is none.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that these bytes complete; data of several lines has LF between them."""
        text = self._rest + piece
        if b"\r" in text:
            # a CR at the end may be half of a line's end
            whole, held = (text[:-1], text[-1:]) if text.endswith(b"\r") else (text, b"")
            text = whole.replace(b"\r\n", b"\n").replace(b"\r", b"\n") + held
        *lines, self._rest = text.split(b"\n")
        events: list[bytes] = []
        for line in lines:
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
        return events
