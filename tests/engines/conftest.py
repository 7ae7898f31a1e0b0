"""A tiny model on disk, loaded, scheduled and served: each made once for all tests of the built-in engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.tiny import write_model
from miles_core.engine.base import EngineConfig
from miles_engines.local import LocalEngine, launch_engine
from miles_engines.local_server import model as models
from miles_engines.local_server.settings import Settings


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny random Qwen3."""
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def settings(tiny: Path) -> Settings:
    """Settings that serve it on the CPU."""
    return Settings(model=tiny, checkpoint=tiny, tito_model="qwen3", device="cpu")


@pytest.fixture(scope="session")
def model(settings: Settings) -> models.Model:
    """The model in this process."""
    return models.load(settings, lambda text: None)


@pytest.fixture(scope="session")
def engine(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    """A served engine."""
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    config = EngineConfig(model=str(tiny), checkpoint=str(tiny), tito_model="qwen3", log_file=log)
    running = launch_engine(config)
    assert isinstance(running, LocalEngine)
    yield running
    running.close()
