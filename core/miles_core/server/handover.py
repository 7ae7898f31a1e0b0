"""A client's connection at a port that several processes share: it moves to the process that has its session."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from miles_core.server.peers import CLIENT, FRESH, INTERNAL, Arrival, Peers, log


class SharedConnection(HttpToolsProtocol):
    """uvicorn's connection, which looks at how a request begins before any of it is read.

    Between two requests nothing is known here that the next process would need, so that is where it moves.
    """

    def __init__(self, peers: Peers, *, arrival: Arrival | None = None, **given: Any) -> None:
        super().__init__(**given)
        self._peers = peers
        self._arrived = arrival.data if arrival is not None else b""
        self._kind = arrival.kind if arrival is not None else CLIENT
        self._reading = False
        """Whether some of a request was read, and not all of it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open; what another process read from it comes first."""
        super().connection_made(transport)  # type: ignore[arg-type]  # uvloop's are of no class of asyncio's
        if self._arrived:
            data, self._arrived = self._arrived, b""
            self.data_received(data)

    def data_received(self, data: bytes) -> None:
        """Read it here, or move the connection if it begins a request for another process."""
        if self._kind in (CLIENT, FRESH) and self._between():
            here = self._peers.number
            number, kind = (here, CLIENT) if self._kind == FRESH else self._peers.place(data)
            self._kind = CLIENT
            if number != here and self._move(number, data, kind):
                return
        super().data_received(data)

    def _between(self) -> bool:
        """Whether the last request is answered, and no other was begun."""
        last: RequestResponseCycle | None = self.cycle
        return not self._reading and (last is None or last.response_complete)

    def _move(self, number: int, data: bytes, kind: bytes) -> bool:
        """Hand the connection over with what was read; not while a slow client still has to be sent an answer."""
        if self.transport.get_write_buffer_size():
            return False
        try:
            self._peers.links[number].put(self.transport.get_extra_info("socket").fileno(), data, kind)
        except OSError as error:
            log.warning(
                "a connection could not be handed over to process %d, which is asked instead: %s", number, error
            )
            return False
        self._unset_keepalive_if_required()
        self.transport.abort()  # closes our file of it alone
        return True

    def on_message_begin(self) -> None:
        """A request begins."""
        self._reading = True
        super().on_message_begin()
        if self._kind == INTERNAL:
            self.scope["state"]["internal"] = True

    def on_message_complete(self) -> None:
        """A request was read whole."""
        self._reading = False
        super().on_message_complete()


def connections(peers: Peers) -> type[asyncio.Protocol]:
    """What uvicorn makes for each connection."""
    return partial(SharedConnection, peers)  # type: ignore[return-value]  # it only calls it


def take_over(server: uvicorn.Server, peers: Peers) -> None:
    """Serve the connections that other processes hand over, from now on; call when the server has started."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    async def serve(arrival: Arrival) -> None:
        connection = SharedConnection(
            peers,
            arrival=arrival,
            config=server.config,
            server_state=server.server_state,
            app_state=server.lifespan.state,
            _loop=loop,
        )
        try:
            await loop.connect_accepted_socket(lambda: connection, arrival.socket)
        except OSError:
            arrival.socket.close()  # the client left while it was on its way
            return
        if server.should_exit:  # answered, and closed: as uvicorn does with those it had before
            connection.shutdown()

    def take(arrival: Arrival) -> None:
        task = loop.create_task(serve(arrival))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    peers.links[peers.number].listen(take)
