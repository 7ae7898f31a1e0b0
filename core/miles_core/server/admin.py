"""`/admin/…`: the workers of a running server, and weight updates to all of them. Never open to agents."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import orjson

from miles_core.engine.route import Worker
from miles_core.errors import EngineUnreachable, Forbidden, RequestError, Unauthorized
from miles_core.server.auth import bearer, same_key
from miles_core.server.http import Reply, Request, json_reply
from miles_core.server.service import SessionService
from miles_core.session.body import parse_body, short

log = logging.getLogger("miles.server")

UPDATES = (
    "update_weights_from_disk", "update_weights_from_distributed", "update_weights_from_tensor",
    "update_weights_from_ipc",
)  # fmt: skip
RENEW = (*UPDATES, "update_weight_version")
"""Calls after which a worker's `/model_info` says something else."""
CALLS = frozenset({
    *RENEW, "pause_generation", "continue_generation", "flush_cache", "init_weights_update_group",
    "destroy_weights_update_group", "release_memory_occupation", "resume_memory_occupation",
})  # fmt: skip
"""What is passed to the workers, under the engine's own names."""

MODES = ("in_place", "retract")
CATCH_UP_SECONDS = 5.0
"""How long a process that starts waits for what the others know."""
STATE = "/admin/state"
"""Where the processes of one server tell each other what an administrator changed; closed to everybody else."""


class Admin:
    """Answers below `/admin/`."""

    def __init__(self, service: SessionService) -> None:
        self._service = service
        self._engines = service.engines
        self._router = service.engines.router
        self._one_at_a_time = asyncio.Lock()

    async def answer(self, request: Request, limit: int) -> Reply:
        """The answer to a request below `/admin/`. Raises MilesError."""
        self._require(request)
        path = request.path[len("/admin/") :].rstrip("/")
        if path == "engines":
            return await self._on_engines(request, limit)
        if path == "state" and request.internal:
            return await self._on_state(request, limit)
        if path not in CALLS:
            raise RequestError(f"/admin/{path}: expected engines, {', '.join(sorted(CALLS))}", status=404)
        if request.method != "POST":
            raise RequestError(f"{request.method} /admin/{path}: expected POST", status=405)
        raw = await request.body(limit)
        async with self._one_at_a_time:
            return await self._call(path, raw, self._asked(request))

    def _require(self, request: Request) -> None:
        if request.internal:
            return
        key = self._service.settings.admin_api_key
        if key is None:
            raise Forbidden(
                "the admin API is off: start the server with --admin-api-key KEY or MILES_ADMIN_API_KEY, "
                "and send the key as 'Authorization: Bearer <key>'"
            )
        given = bearer(request.header(b"authorization"))
        if given is None or not same_key(given, key):
            raise Unauthorized(
                "the admin API takes the admin key (--admin-api-key) as 'Authorization: Bearer <key>'; "
                "keys of agents and sessions do not open it"
            )

    # -- workers -----------------------------------------------------------------------------------------------

    async def _on_engines(self, request: Request, limit: int) -> Reply:
        if request.method in ("GET", "HEAD"):
            return json_reply({"engines": await self._shown(request)})
        if request.method not in ("POST", "DELETE"):
            raise RequestError(f"{request.method} /admin/engines: expected GET, POST or DELETE", status=405)
        body = parse_body(raw) if (raw := await request.body(limit)).strip() else {}
        url = _engine_url(request.parameter("url") or body.get("url"))
        if request.method == "POST":
            worker = await self._change(url, body)
            await self._tell_others({"engines": [_change_of(worker)]})
            return json_reply({"engine": _row(worker)})
        removed = self._remove(url)
        await self._tell_others({"removed": [url]})
        return json_reply({"removed": removed})

    async def _change(self, url: str, body: Mapping[str, Any]) -> Worker:
        """Add a worker, which takes sessions once it is seen to be well, or change whether one is draining."""
        draining = body.get("draining", False)
        if not isinstance(draining, bool):
            raise RequestError(f"draining must be true or false (found {short(draining)})")
        new = self._router.get(url) is None
        worker = self._router.add(url)
        worker.draining = draining
        if new:
            log.info("the engine at %s was added", url)
            await self._engines.health.first(worker)
        return worker

    def _remove(self, url: str) -> dict[str, Any]:
        if self._router.get(url) is None:
            known = ", ".join(worker.url for worker in self._router.workers)
            raise RequestError(f"{url} is not one of the engines: {known}", status=404)
        if len(self._router.workers) == 1:
            raise RequestError(f"{url} is the only engine: add another one first", status=409)
        worker = self._router.remove(url)
        self._service.book.drop(url)
        log.info("the engine at %s was removed", url)
        return _row(worker) if worker is not None else {}

    async def _shown(self, request: Request) -> list[dict[str, Any]]:
        """The workers, with what all processes have on them."""
        rows = [_row(worker) for worker in self._router.workers]
        peers = self._service.peers
        if request.internal or peers is None:
            return rows
        for status, body in await peers.broadcast("GET", "/admin/engines", b"", []):
            theirs = {row["url"]: row for row in orjson.loads(body)["engines"]} if status == 200 else {}
            for row in rows:
                for key in ("sessions", "in_flight", "errors"):
                    row[key] += theirs.get(row["url"], {}).get(key, 0)
        return rows

    # -- other processes ---------------------------------------------------------------------------------------

    async def _tell_others(self, change: Mapping[str, Any]) -> None:
        """What was changed here, alone: others may be changing something else at the same time."""
        peers = self._service.peers
        if peers is None:
            return
        for status, body in await peers.broadcast("POST", STATE, orjson.dumps(change), []):
            if status != 200:
                log.error("a process of this server did not take the engines' change: %d %s", status, body[:200])

    async def catch_up(self) -> None:
        """Take over what was changed before this process started, from any other."""
        peers = self._service.peers
        if peers is None:
            return
        try:
            async with asyncio.timeout(CATCH_UP_SECONDS):
                answers = await peers.broadcast("GET", STATE, b"", [])
        except TimeoutError:
            log.error("the other processes did not say which engines there are: those of the command line are used")
            return
        state = next((orjson.loads(body) for status, body in answers if status == 200), None)
        if state is not None:
            there = {row["url"] for row in state["engines"]}
            self._apply({**state, "removed": [one.url for one in self._router.workers if one.url not in there]})

    async def _on_state(self, request: Request, limit: int) -> Reply:
        if request.method == "POST":
            self._apply(orjson.loads(await request.body(limit)))
            return json_reply({})
        return json_reply({"engines": list(map(_change_of, self._router.workers)), "paused": self._engines.paused})

    def _apply(self, change: Mapping[str, Any]) -> None:
        """Do what another process did: each key is there if something of that kind was changed."""
        for row in change.get("engines", ()):
            new = self._router.get(row["url"]) is None
            worker = self._router.add(row["url"])
            worker.draining = row["draining"]
            worker.healthy = row["healthy"] if new else worker.healthy
        for url in change.get("removed", ()):
            self._router.remove(url)
            self._service.book.drop(url)
        for url in change.get("weights", ()):
            self._service.book.forget(url)
        if "paused" in change:
            self._engines.paused = change["paused"]

    # -- calls to the workers ----------------------------------------------------------------------------------

    def _asked(self, request: Request) -> list[str]:
        """The workers that a call goes to: all, or the one it names."""
        one = request.parameter("engine")
        known = [worker.url for worker in self._router.workers]
        if one is None:
            return known
        if one.rstrip("/") not in known:
            raise RequestError(f"engine={one} is not one of the engines: {', '.join(known)}", status=404)
        return [one.rstrip("/")]

    async def _call(self, name: str, raw: bytes, urls: Sequence[str]) -> Reply:
        """The same request to each worker at once; 200 if all did it, else 502 with each one's answer."""
        body = parse_body(raw) if raw.strip() else {}
        _check_call(name, body, self._engines.paused)
        rows = await asyncio.gather(*(self._one(url, name, raw or b"{}") for url in urls))
        if name == "pause_generation" and any(row["ok"] for row in rows):
            await self._note(str(body["mode"]))
        elif name == "continue_generation" and all(row["ok"] for row in rows):
            await self._note(None)
        failed = [row for row in rows if not row["ok"]]
        if not failed:
            return json_reply({"engines": rows})
        told = "; ".join(map(_told, failed))
        others = "the others did it. Repeat it for one with ?engine=URL, or remove that engine"
        rest = others if len(failed) < len(rows) else "none did it"
        error = f"{name} failed on {len(failed)} of {len(rows)} engines ({told}); {rest}"
        return json_reply({"error": error, "type": "engine_error", "code": 502, "engines": rows}, 502)

    async def _one(self, url: str, name: str, raw: bytes) -> dict[str, Any]:
        row = await self._ask(url, name, raw)
        if name in RENEW:  # whatever the answer: a failed update may have been half of one
            self._service.book.forget(url)
            await self._tell_others({"weights": [url]})
        return row

    async def _ask(self, url: str, name: str, raw: bytes) -> dict[str, Any]:
        try:
            reply = await self._engines.client.request(
                "POST", f"{url}/{name}", body=raw, headers={"Content-Type": "application/json"}
            )
        except EngineUnreachable as error:
            self._router.failed(url, error.message)
            return {"engine": url, "ok": False, "status": None, "answer": error.message}
        try:
            answer = orjson.loads(reply.body)
        except orjson.JSONDecodeError:
            answer = reply.body.decode("utf-8", "replace")
        refused = isinstance(answer, dict) and answer.get("success") is False
        return {"engine": url, "ok": reply.status == 200 and not refused, "status": reply.status, "answer": answer}

    async def _note(self, paused: str | None) -> None:
        self._engines.paused = paused
        await self._tell_others({"paused": paused})


def _engine_url(given: object) -> str:
    if not isinstance(given, str) or not _is_base_url(given):
        raise RequestError(f"url must be an engine's base URL, such as http://10.0.0.7:30000 (found {short(given)})")
    return given.rstrip("/")


def _is_base_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        reachable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, or half a pair of brackets
        return False
    return reachable and not parts.query and not parts.fragment and text.isprintable() and " " not in text


def _change_of(worker: Worker) -> dict[str, Any]:
    """A worker as processes tell each other of it."""
    return {"url": worker.url, "draining": worker.draining, "healthy": worker.healthy}


def _row(worker: Worker) -> dict[str, Any]:
    return {
        "url": worker.url,
        "state": worker.state,
        "kind": worker.kind,
        "router": worker.router,
        "sessions": worker.sessions,
        "in_flight": worker.in_flight,
        "errors": worker.errors,
        "last_error": worker.last_error,
    }


def _check_call(name: str, body: Mapping[str, Any], paused: str | None) -> None:
    """Refuse what would end running turns, or end an engine."""
    if name == "pause_generation" and body.get("mode") not in MODES:
        raise RequestError(
            f'pause_generation with mode={short(body.get("mode", "abort"))}: send "mode": "retract" or "in_place". '
            "abort (the engine's default) ends the turns that run: agents get them unfinished, and nothing of them is "
            "kept"
        )
    if body.get("abort_all_requests"):
        raise RequestError(
            f'{name} with "abort_all_requests": true ends the turns that run, and nothing of them is kept: '
            'leave it out, and use pause_generation with "mode": "retract" or "in_place" around the update'
        )
    if name in UPDATES and paused == "in_place" and body.get("flush_cache", True) is not False:
        raise RequestError(
            f'{name} while generation is paused with mode=in_place: send "flush_cache": false. The requests that are '
            "held keep their part of the prefix cache, and SGLang ends when it cannot flush it; to recompute it under "
            'the new weights, pause with "mode": "retract"'
        )


def _told(row: dict[str, Any]) -> str:
    """An engine, and its status, if it answered, with what it said."""
    status = f"{row['status']} " if row["status"] else ""
    return f"{row['engine']}: {status}{short(row['answer'])}"
