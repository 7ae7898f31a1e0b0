"""The HTTP application: routes, JSON, event streams, and errors in the shape each route's clients expect."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, cast

import orjson
from aiohttp import web

from miles_engines.local_server import admin, chat, chat_stream, generate
from miles_engines.local_server.protocol import ApiError, ChatBody, GenerateBody, read
from miles_engines.local_server.service import Service

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
log = logging.getLogger("miles.engine")

MAX_BODY = 1 << 30
"""Bytes; requests carry all ids of a long context."""

SERVICE = web.AppKey("service", Service)
OPENAI_ROUTES = ("/v1/",)


def build_app(service: Service) -> web.Application:
    """The application for a running engine."""
    app = web.Application(client_max_size=MAX_BODY, middlewares=[errors])
    app[SERVICE] = service
    app.router.add_post("/v1/chat/completions", post_chat)
    app.router.add_route("POST", "/generate", post_generate)
    app.router.add_route("PUT", "/generate", post_generate)
    for method, path, action in admin.ROUTES:
        app.router.add_route(method, path, _admin_handler(action))
    return app


def json_reply(body: Any, status: int = 200) -> web.Response:
    """A JSON answer."""
    return web.Response(body=dump(body), status=status, content_type="application/json")


def dump(body: Any) -> bytes:
    """JSON bytes; text that is no valid Unicode (a lone surrogate in a request's field) is escaped."""
    try:
        return orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:
        return json.dumps(body).encode()


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors as SGLang words them: by route, and FastAPI's for paths and methods it does not know."""
    try:
        return await handler(request)
    except ApiError as error:
        return _refusal(request, error)
    except web.HTTPException as error:
        return json_reply({"detail": error.reason}, error.status)
    except Exception as error:  # the boundary: whatever went wrong, this request gets an answer
        log.exception("%s %s failed", request.method, request.path)
        text = f"the local engine failed: {type(error).__name__}: {error}"
        return _refusal(request, ApiError(text, status=500, kind="InternalServerError"))


def _refusal(request: web.Request, error: ApiError) -> web.Response:
    openai = request.path.startswith(OPENAI_ROUTES)
    return json_reply(error.openai_body() if openai else error.plain_body(), error.status)


async def post_chat(request: web.Request) -> web.StreamResponse:
    """`POST /v1/chat/completions`."""
    service = request.app[SERVICE]
    opened = chat.open_chat(service, read(ChatBody, await request.read()))
    if not opened.body.stream:
        return json_reply(await chat.answer(service, opened))
    async with service.running(opened.jobs):
        return await _stream(request, chat_stream.events(service, opened), ApiError.openai_body)


async def post_generate(request: web.Request) -> web.StreamResponse:
    """`POST /generate`."""
    service = request.app[SERVICE]
    opened = generate.open_generation(service, read(GenerateBody, await request.read()))
    if not opened.body.stream:
        return json_reply(await generate.answer(service, opened))
    async with service.running(opened.jobs):
        return await _stream(request, generate.events(service, opened), ApiError.plain_body)


async def _stream(
    request: web.Request, events: AsyncIterator[dict[str, Any]], error_body: Callable[[ApiError], dict[str, Any]]
) -> web.StreamResponse:
    """Send events as they come. Faults after the first are a data event under status 200, as in SGLang."""
    response = web.StreamResponse()
    response.headers["Content-Type"] = "text/event-stream; charset=utf-8"
    response.headers["Cache-Control"] = "no-cache"
    async with aclosing(cast("Any", events)) as source:
        try:
            async for event in source:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(b"data: " + dump(event) + b"\n\n")
        except ApiError as error:
            if not response.prepared:
                raise
            failure = error_body(error)
            body = failure if "error" in failure else {"error": failure}
            await response.write(b"data: " + dump(body) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _admin_handler(action: admin.Action) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        body = await action(request.app[SERVICE], await request.read())
        if isinstance(body, str):
            return web.Response(text=body) if body else web.Response()
        return json_reply(body)

    return handle
