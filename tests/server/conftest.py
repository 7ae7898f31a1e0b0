"""A session server over a fake engine, shared by the tests of one process; each test gets its own sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from helpers.chat_tokenizer import write_checkpoint
from helpers.fake_engine import FakeEngine, fake_engine
from helpers.sessions import Serve, Talk
from miles_core.plugins import Registry
from miles_core.server.app import ServerThread
from miles_core.server.settings import ServerSettings


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def registry() -> Registry:
    return Registry.discover()


@pytest.fixture(scope="session")
def shared_engine() -> Iterator[FakeEngine]:
    with fake_engine() as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: FakeEngine) -> FakeEngine:
    shared_engine.reset()
    return shared_engine


@pytest.fixture(scope="session")
def session_server(shared_engine: FakeEngine, checkpoint: Path, registry: Registry) -> Iterator[ServerThread]:
    settings = ServerSettings(checkpoint=str(checkpoint), tito_model="qwen3", engine_urls=(shared_engine.url,))
    with ServerThread(settings, registry) as server:
        yield server


@pytest.fixture
def serve(engine: FakeEngine, checkpoint: Path, registry: Registry) -> Iterator[Serve]:
    """Start a server with settings of its own."""
    with ExitStack() as stack:

        def start(**settings: Any) -> ServerThread:
            given = {
                "checkpoint": str(checkpoint),
                "tito_model": "qwen3",
                "engine_urls": (engine.url,),
                **settings,
            }
            return stack.enter_context(ServerThread(ServerSettings(**given), registry))

        yield start


Servers = Callable[[str, str], ServerThread]
"""A server of a history and a built-in matcher."""


@pytest.fixture(scope="module")
def servers(checkpoint: Path, registry: Registry, shared_engine: FakeEngine) -> Iterator[Servers]:
    """Servers in both modes under each matcher, which gives every leaf; started when they are first asked for."""
    with ExitStack() as stack:

        @cache
        def server(history: str, matcher: str) -> ServerThread:
            settings = ServerSettings(
                checkpoint=str(checkpoint), tito_model="qwen3", engine_urls=(shared_engine.url,), history=history,
                message_matcher=matcher, pick_samples="helpers.sample_hooks.pick_all",
            )  # fmt: skip
            return stack.enter_context(ServerThread(settings, registry))

        yield server


@pytest.fixture
def url(session_server: ServerThread, engine: FakeEngine) -> str:
    return session_server.url


@pytest.fixture
def talk(url: str) -> Talk:
    return Talk(url)
