"""A request that another process answers, where its connection could not move there."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from miles_core.engine.connection import Connection, EngineReply, Incoming
from miles_core.errors import Overloaded
from miles_core.server.http import Reply, Request, WhileConnected
from miles_core.server.peers import RELAYED, Peers, head

CONNECTIONS_OWN = frozenset({b"date", b"server", b"connection", b"keep-alive", b"transfer-encoding"})
"""Headers that our own answer has anyway."""


async def relay(peers: Peers, owner: int, request: Request, limit: int) -> Reply:
    """Ask the other process, and answer as it does, as it comes; a client that hangs up takes the request with it.

    Raises BodyTooLarge (413), and Overloaded (503) if the process ends meanwhile.
    """
    body = await request.body(limit)
    asked = head(request.method, request.target, body, request.headers)
    try:
        connection = await peers.connect(owner, RELAYED)
        try:
            with WhileConnected(request):
                return await _answer(connection, asked, body, bodiless=request.method == "HEAD")
        except BaseException:
            connection.close()
            raise
    except (OSError, EOFError, ValueError) as error:
        raise Overloaded(
            f"the process that has this session did not answer ({error}); send the request again",
            retry_after=1,
            status=503,
        ) from error
    connection.close()
    return Reply(status=499)


async def _answer(connection: Connection, asked: bytes, body: bytes, *, bodiless: bool) -> Reply:
    answer = await (connection.exchange(asked, body, bodiless=True) if bodiless else connection.open(asked, body))
    headers = [(name, value) for name, value in answer.headers if name.lower() not in CONNECTIONS_OWN]
    return Reply(_pieces(answer), answer.status, headers=headers, close=connection.close)


async def _pieces(answer: Incoming | EngineReply) -> AsyncGenerator[bytes, None]:
    while isinstance(answer, Incoming) and (piece := await answer.piece()):
        yield piece
