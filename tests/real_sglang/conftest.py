"""One SGLang for all tests here, launched as `--engine sglang` does, and a session server in front of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_core.engine.base import EngineConfig
from miles_core.server.app import ServerThread
from miles_core.server.settings import ServerSettings
from miles_engines.sglang import SGLangEngine, launch_engine
from real_sglang.environment import reason_to_skip
from real_sglang.launched import ENVIRONMENT, NOTING, flags, write_noting_plugin
from real_sglang.model import write_model


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """They are slow, and wait for SGLang on a busy machine."""
    here = Path(__file__).parent
    reason = reason_to_skip()
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(1200))
            if reason is not None and not os.environ.get("CI"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that is served."""
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def told() -> list[str]:
    """What the launcher says."""
    return []


@pytest.fixture(scope="session")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the third party's plugin notes that it ran."""
    folder = tmp_path_factory.mktemp("plugin")
    sys.path.insert(0, str(folder))
    yield write_noting_plugin(folder)
    sys.path.remove(str(folder))
    sys.modules.pop(NOTING, None)


@pytest.fixture(scope="session")
def engine(model: Path, ran: Path, told: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    """SGLang, serving."""
    config = EngineConfig(
        model=str(model),
        checkpoint=str(model),
        tito_model="qwen3",
        log_file=tmp_path_factory.mktemp("engine") / "engine.log",
        options=(*flags(), "--plugin", f"{NOTING}.plugin"),
        environment=ENVIRONMENT,
        start_timeout=1200,
        progress=told.append,
    )
    running = launch_engine(config)
    assert isinstance(running, SGLangEngine)
    yield running
    running.close()


@pytest.fixture(scope="session")
def server(engine: SGLangEngine, model: Path) -> Iterator[ServerThread]:
    """A session server for it."""
    settings = ServerSettings(
        checkpoint=str(model), tito_model="qwen3", engine_urls=engine.urls, host="127.0.0.1", port=0
    )
    with ServerThread(settings) as running:
        yield running
