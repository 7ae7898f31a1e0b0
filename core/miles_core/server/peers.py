"""The processes of one server, as one of them sees them: whose a request is, and how its connection gets there.

A session lives in the process that created it, and the first digits of its id say which. What is handed over is not
the request but the client's connection, with the bytes that were read from it: its process then serves it as if it had
accepted it, so nothing is parsed, copied or awaited twice, streams are live, and a client that hangs up is noticed
where it matters. A connection moves again when a later request on it is for another process.

What cannot move (a request that came before the one ahead of it was answered, one whose first bytes do not say whose
it is) is asked for over a connection of our own, which is handed over in the same way (`relay.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import socket
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import orjson

from miles_core.engine.connection import Connection
from miles_core.server.board import SESSIONS, TURNS, UP, Board

log = logging.getLogger("miles.server")

DIGITS = 2
"""Hex digits of a session's id that name its process; the other 30 are random: 120 bits."""

INLINE = 2**16
"""Bytes that travel in the message itself; sockets refuse much longer ones, so more goes through a memory file."""

BROADCAST_SECONDS = 60.0
"""How long another process may take to answer what it is asked."""

CLIENT, FRESH, RELAYED, INTERNAL = b"c", b"f", b"r", b"i"
"""What kind of connection a message brings: a client's; a client's whose first request creates a session here; another
process', for a client's request; another process', for what it wants itself."""

_SESSION = re.compile(rb"[A-Z]+ /sessions/([0-9a-f]{32})[/? ]")
_PATH = re.compile(r"/sessions/([0-9a-f]{32})(?:/|\Z)")
_CREATE = re.compile(rb"POST /sessions/?[? ]")


def new_id(number: int) -> str:
    """An id for a session of that process: 32 hex digits that cannot be guessed."""
    return f"{number:0{DIGITS}x}{secrets.token_hex(16)[DIGITS:]}"


@dataclass(frozen=True)
class Arrival:
    """A connection that was handed over, and what was read from it so far."""

    socket: socket.socket
    data: bytes
    kind: bytes


class Link:
    """Where connections for one process are put; all processes write to it, and that one reads.

    It was made before the processes and outlives them: what waits in it when its process dies is for the next one.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._waiting: deque[Arrival] = deque()

    def put(self, file: int, data: bytes, kind: bytes) -> None:
        """Hand a connection over, as soon as there is room; the caller may close its own file of it now.

        Raises OSError if it cannot be.
        """
        if not self._waiting:
            try:
                self._send(file, data, kind)
                return
            except BlockingIOError:
                asyncio.get_running_loop().add_writer(self._writer.fileno(), self._flush)
        self._waiting.append(Arrival(socket.socket(fileno=os.dup(file)), data, kind))

    def _flush(self) -> None:
        while self._waiting:
            arrival = self._waiting[0]
            try:
                self._send(arrival.socket.fileno(), arrival.data, arrival.kind)
            except BlockingIOError:
                return
            except OSError as error:
                log.error("a connection is lost: it could not be handed over to its process: %s", error)
            self._waiting.popleft().socket.close()
        asyncio.get_running_loop().remove_writer(self._writer.fileno())

    def _send(self, file: int, data: bytes, kind: bytes) -> None:
        if len(data) <= INLINE:
            socket.send_fds(self._writer, [kind, data], [file])
            return
        with open(os.memfd_create("request"), "wb") as rest:
            rest.write(data)
            rest.flush()
            socket.send_fds(self._writer, [kind], [file, rest.fileno()])

    def close(self) -> None:
        """Drop it, with what still waits in it."""
        self._reader.close()
        self._writer.close()

    def listen(self, take: Callable[[Arrival], object]) -> None:
        """Call `take` with what arrives, from now on; in the process that owns the link."""

        def read() -> None:  # one at a time: called again if there are more, while asking in vain costs as much
            with contextlib.suppress(BlockingIOError):
                if (arrival := self._read()) is not None:
                    take(arrival)

        asyncio.get_running_loop().add_reader(self._reader.fileno(), read)

    def deafen(self) -> None:
        """Call it no more."""
        asyncio.get_running_loop().remove_reader(self._reader.fileno())

    def _read(self) -> Arrival | None:
        message, files, _, _ = socket.recv_fds(self._reader, INLINE + 1, 2, socket.MSG_CMSG_CLOEXEC)
        if not files:  # the process may have no file number left for it
            log.error("a connection is lost: it was handed over, and could not be taken")
            return None
        data = message[1:]
        if len(files) > 1:
            with open(files[1], "rb") as reader:
                reader.seek(0)
                data = reader.read()
        return Arrival(socket.socket(fileno=files[0]), data, message[:1])


@dataclass
class Peers:
    """The processes of a server, seen from process `number`; lives in its event loop."""

    number: int
    board: Board
    links: list[Link]
    _turn: int = field(default=0, init=False)
    _asking: set[Connection] = field(default_factory=set, init=False)

    # -- whose a request is ------------------------------------------------------------------------------------

    def new_id(self) -> str:
        """An id for a session of this process."""
        return new_id(self.number)

    def owner(self, session_id: str) -> int | None:
        """The other process that has the session, if it is up; None where this process answers.

        A process that ended took its sessions along: anybody can say that they are not there.
        """
        number = int(session_id[:DIGITS], 16)
        if number == self.number or number >= self.board.count or not self.board.get(number, UP):
            return None
        return number

    def owner_of(self, path: str) -> int | None:
        """The same, for the path of a request."""
        found = _PATH.match(path)
        return self.owner(found[1]) if found is not None else None

    def place(self, data: bytes) -> tuple[int, bytes]:
        """The process to which a connection goes on which such a request begins, and as what."""
        found = _SESSION.match(data)
        if found is not None:
            owner = self.owner(found[1].decode())
            return (self.number if owner is None else owner, CLIENT)
        if _CREATE.match(data) is not None:
            return self._next(), FRESH
        return self.number, CLIENT

    def _next(self) -> int:
        """The process that gets the next session: each in turn, whoever accepted the connection."""
        up = list(self.board.up()) or [self.number]
        self._turn += 1
        return up[(self.number + self._turn) % len(up)]

    # -- limits ------------------------------------------------------------------------------------------------

    def other_sessions(self) -> int:
        """How many sessions are open in the other processes."""
        return self.board.others(self.number, SESSIONS)

    def other_turns(self) -> int:
        """How many turns are in flight in the other processes."""
        return self.board.others(self.number, TURNS)

    def tell_sessions(self, count: int) -> None:
        """Let the others know how many sessions are open here."""
        self.board.put(self.number, SESSIONS, count)

    def tell_turns(self, count: int) -> None:
        """Let the others know how many turns are in flight here."""
        self.board.put(self.number, TURNS, count)

    # -- asking others -----------------------------------------------------------------------------------------

    async def broadcast(
        self, method: str, path: str, body: bytes, headers: Iterable[tuple[bytes, bytes]]
    ) -> list[tuple[int, bytes]]:
        """Ask every other process that is up: the status and body of each answer.

        There the request is `internal`, so that it is not passed on again. One that breaks off is a 503.
        """
        others = [number for number in self.board.up() if number != self.number]
        asked = [self._answer(number, method, path, body, headers) for number in others]
        return list(await asyncio.gather(*asked))

    async def _answer(
        self, number: int, method: str, path: str, body: bytes, headers: Iterable[tuple[bytes, bytes]]
    ) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(BROADCAST_SECONDS):
                connection = await self.connect(number, INTERNAL)
                with contextlib.closing(connection):
                    reply = await connection.exchange(head(method, path.encode("latin-1"), body, headers), body)
        except (OSError, EOFError, ValueError) as error:
            text = f"process {number} of the session server did not answer: {str(error) or type(error).__name__}"
            return 503, orjson.dumps({"error": text, "type": "server_error", "code": 503})
        return reply.status, reply.body

    async def connect(self, number: int, kind: bytes) -> Connection:
        """A new connection to another process, for one request; close it after. Raises OSError."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            _, connection = await loop.create_unix_connection(lambda: Connection(loop, self._asking.discard), sock=ours)
            self._asking.add(connection)
            try:
                self.links[number].put(theirs.fileno(), b"", kind)
            except OSError:
                connection.close()
                raise
        return connection


def head(method: str, target: bytes, body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The head of a request to another process."""
    lines = b"".join(b"%s: %s\r\n" % pair for pair in headers if pair[0] not in _OWN)
    line = b"%s %s HTTP/1.1\r\n" % (method.encode(), target)
    return b"%s%sconnection: close\r\ncontent-length: %d\r\n\r\n" % (line, lines, len(body))


_OWN = frozenset({b"content-length", b"transfer-encoding", b"connection", b"expect", b"keep-alive", b"upgrade"})
"""Headers that belong to the client's connection."""
