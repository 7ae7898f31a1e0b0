"""A scripted engine for generate functions."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from helpers.fake_generate import FakeGenerate
from miles_core.rollout import http


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeGenerate]:
    """An engine that is served; retries do not wait."""
    monkeypatch.setattr(http, "FIRST_DELAY", 0.0)
    async with FakeGenerate().serving() as fake:
        yield fake
