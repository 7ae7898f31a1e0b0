"""Trying an engine out: it is started, asked for a turn as a session asks for one, and stopped."""

from __future__ import annotations

import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from miles_core.engine.base import Engine, EngineConfig
from miles_core.engine.launch import launch
from miles_core.errors import MilesError
from miles_core.plugins import Plugin
from miles_core.testing.conformance.report import CheckAnswer, Skip

TURN: Mapping[str, Any] = {
    "model": "default",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 8,
    "temperature": 1.0,
    "logprobs": True,
    "return_meta_info": True,
    "no_stop_trim": False,
}
"""A session's request, apart from its `input_ids`."""


@dataclass(frozen=True, kw_only=True)
class EngineTrial:
    """What to start an engine with, and the prompt of a turn, as ids of its model."""

    config: EngineConfig
    input_ids: tuple[int, ...] = (1, 2, 3)


@dataclass(kw_only=True)
class Played:
    """What was seen of an engine, from its start to its end; `failed` says where that was cut short."""

    urls: tuple[str, ...] = ()
    lived: bool = False
    health: int | None = None
    reply: Any = None
    ended: bool = False
    answers_after: bool = True
    failed: str | None = None
    skipped: str | None = None
    prompt: tuple[int, ...] = ()


def play(plugin: Plugin, trial: EngineTrial | None) -> Played:
    """Start the engine, take a turn, stop it."""
    if not plugin.has("launch_engine"):
        return Played(skipped="has no launch_engine: it only configures SGLang")
    if trial is None:
        why = "starting it takes a model"
        return Played(skipped=f"{why}: conforms(…, trial=EngineTrial(config=EngineConfig(…)))")
    played = Played(prompt=trial.input_ids)
    try:
        engine = launch(plugin, trial.config)
    except MilesError as error:
        played.failed = error.message
        return played
    try:
        _take_turn(engine, played)
    except (OSError, ValueError) as error:
        played.failed = f"{type(error).__name__}: {error}"
    finally:
        engine.close()
        engine.close()
    played.ended = not engine.alive()
    played.answers_after = any(_answers(url) for url in played.urls)
    return played


def _take_turn(engine: Engine, played: Played) -> None:
    played.urls, played.lived = tuple(engine.urls), engine.alive()
    with _open(f"{played.urls[0]}/health") as response:
        played.health = response.status
    body = {**TURN, "input_ids": list(played.prompt)}
    with _open(f"{played.urls[0]}/v1/chat/completions", json.dumps(body).encode()) as response:
        played.reply = json.load(response)


def _open(url: str, body: bytes | None = None) -> Any:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    return opener.open(request, timeout=60)


def _answers(url: str) -> bool:
    """Whether something still listens, half a second after it was to stop."""
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        with suppress(urllib.error.HTTPError):
            try:
                _open(f"{url}/health").close()
            except (urllib.error.URLError, OSError):
                return False
        time.sleep(0.05)
    return True


def starts(played: Played) -> CheckAnswer:
    """It has URLs without a trailing slash, lives, and answers `/health` when `launch_engine` returns."""
    if played.skipped:
        return Skip(played.skipped)
    if not played.urls and played.failed:
        return played.failed
    if not played.urls or any(url.endswith("/") or "://" not in url for url in played.urls):
        return f"its urls are {played.urls!r}; give URLs without a trailing slash"
    if not played.lived:
        return "alive() was not True after launch_engine had returned"
    if played.health is None:
        return f"it does not answer {played.urls[0]}/health: {played.failed}"
    return None


def takes_a_turn(played: Played) -> CheckAnswer:
    """A chat request with `input_ids` gets a message, and the sampled ids with finite log-probabilities."""
    if played.skipped or not played.urls:
        return Skip("it was not started, see above")
    if played.reply is None:
        return f"a turn failed: {played.failed}"
    try:
        choice = played.reply["choices"][0]
        entries, count = choice["meta_info"]["output_token_logprobs"], choice["meta_info"]["completion_tokens"]
        content = choice["message"]["content"]
    except (KeyError, IndexError, TypeError) as error:
        return f"its answer lacks {error}: a turn needs choices[0].message.content and .meta_info"
    if not isinstance(content, str):
        return f"choices[0].message.content is {content!r}, not text"
    if len(entries) != count:
        return f"it sent {len(entries)} output_token_logprobs for completion_tokens={count}"
    bad = [entry for entry in entries if not (math.isfinite(entry[0]) and isinstance(entry[1], int))]
    return f"output_token_logprobs has {bad[0]}; an entry is [log-probability, id, …]" if bad else None


def stops(played: Played) -> CheckAnswer:
    """After `close()`, which may be called twice, nothing lives or listens."""
    if played.skipped or not played.urls:
        return Skip("it was not started, see above")
    if not played.ended:
        return "alive() is still True after close()"
    return f"{played.urls[0]} still answers after close()" if played.answers_after else None


CHECKS: Mapping[str, Callable[[Played], CheckAnswer]] = {
    "starts": starts,
    "takes a turn": takes_a_turn,
    "stops": stops,
}
OPTIONAL: frozenset[str] = frozenset()
