"""Long requests on a connection to an engine that may not read them to their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from miles_core.engine.client import EngineClient
from miles_core.errors import EngineUnreachable

LONG = (b"x" * 3_000_000, b"", b"y" * 5_000_000)
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def engine(serve: Serve) -> AsyncGenerator[str, None]:
    """The URL of something that takes connections."""

    async def each(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(each, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/x"


async def head_of(reader: asyncio.StreamReader) -> int:
    """Reads a request's head; the length of its body."""
    head = await reader.readuntil(b"\r\n\r\n")
    return int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])


@pytest.mark.parametrize("body", [b"short", b"z" * 100_000, b"z" * 2_000_000, LONG, (b"a", b"b"), ()])
async def test_parts_arrive_whole_and_in_order(body: bytes | tuple[bytes, ...]) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            read = await reader.readexactly(await head_of(reader))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(read), read))
            await writer.drain()

    whole = body if isinstance(body, bytes) else b"".join(body)
    client = EngineClient()
    async with engine(serve) as url:
        for _ in range(2):  # on one connection
            assert (await client.request("POST", url, body=body)).body == whole
            stream = await client.stream(url, body=body)
            assert (await stream.whole()).body == whole
            stream.close()
        assert len(client._open) == 1
        await client.close()


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_that_does_not_wait_for_the_body_is_the_answer(streamed: bool) -> None:
    """An engine that refuses a request by its length does not read it; it may keep the connection open."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\n\r\nno!")
        await writer.drain()
        left.set()
        await done.wait()

    left, done, client = asyncio.Event(), asyncio.Event(), EngineClient()
    async with engine(serve) as url:
        if streamed:
            reply = await (await client.stream(url, body=LONG)).whole()
        else:
            reply = await client.request("POST", url, body=LONG)
        assert (reply.status, reply.body) == (413, b"no!")
        done.set()
        await client.close()


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("answer", [b"HTTP/1.1 413 Too Large\r\nserver: x\r\n\r\nno!", b""], ids=["answer", "nothing"])
async def test_an_engine_that_says_its_last_and_reads_no_more(answer: bytes, streamed: bool) -> None:
    """It has closed its side, and lets the other one open: what is left of the body is for nobody."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        while not any(connection._full for connection in client._open):  # noqa: ASYNC110  # nothing tells us
            await asyncio.sleep(0)
        writer.write(answer)
        writer.write_eof()
        await done.wait()

    async def ask() -> tuple[int, bytes]:
        if streamed:
            reply = await (await client.stream(url, body=LONG)).whole()
        else:
            reply = await client.request("POST", url, body=LONG)
        return reply.status, reply.body

    done, client = asyncio.Event(), EngineClient()
    async with engine(serve) as url, asyncio.timeout(60):
        if answer:
            assert await ask() == (413, b"no!")
        else:
            with pytest.raises(EngineUnreachable, match="the connection was closed before the answer"):
                await ask()
        done.set()
        await client.close()


@pytest.mark.parametrize("read", [0, 1_000_000])
async def test_an_engine_that_breaks_off_in_the_middle_is_named(read: int) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        await reader.readexactly(read)
        writer.transport.abort()

    client = EngineClient()
    async with engine(serve) as url:
        with pytest.raises(EngineUnreachable, match=f"the engine at {url} could not be reached or broke off"):
            await client.request("POST", url, body=LONG)
        await client.close()


async def test_a_long_body_leaves_the_loop_to_others() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(await head_of(reader))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    rounds, sending, client = 0, True, EngineClient()

    async def other() -> None:
        nonlocal rounds
        while sending:
            rounds += 1
            await asyncio.sleep(0)

    async with engine(serve) as url:
        task = asyncio.create_task(other())
        await client.request("POST", url, body=LONG)
        sending = False
        await task
        assert rounds > 30  # one for each piece, and more
        await client.close()
