"""The floor: what forwarding a turn costs on FastAPI, uvicorn, aiohttp and orjson, without any session.

Usage: `python floor.py PORT ENGINE_URL`. It reads the request, adds `input_ids`, sends it on, reads the answer and
writes it. A request's header `x-ids` says how many ids to write; without it, it is one.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import orjson
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response

IDS = [100_000 + n % 50_000 for n in range(1_000_000)]


def build(engine: str) -> FastAPI:
    """The application that forwards turns to `engine`."""

    @asynccontextmanager
    async def client(app: FastAPI) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            app.state.http = http
            yield

    app = FastAPI(lifespan=client)

    @app.post("/sessions")
    async def create() -> dict[str, str]:
        return {"session_id": secrets.token_hex(16)}

    @app.delete("/sessions/{session_id}")
    async def delete(session_id: str) -> Response:
        return Response(status_code=204)

    @app.post("/sessions/{session_id}/samples")
    async def samples(session_id: str) -> Response:
        return Response(b"", media_type="application/octet-stream")

    @app.post("/sessions/{session_id}/v1/chat/completions")
    async def turn(session_id: str, request: Request) -> Response:
        body = orjson.loads(await request.body())
        body["input_ids"] = IDS[: int(request.headers.get("x-ids", 1))]
        async with app.state.http.post(
            f"{engine}/v1/chat/completions", data=orjson.dumps(body), headers={"content-type": "application/json"}
        ) as answer:
            reply = orjson.loads(await answer.read())
        return Response(orjson.dumps(reply), media_type="application/json")

    return app


if __name__ == "__main__":
    uvicorn.run(
        build(sys.argv[2]),
        port=int(sys.argv[1]),
        log_level="error",
        access_log=False,
        loop="uvloop",
        http="httptools",
        backlog=4096,
    )
