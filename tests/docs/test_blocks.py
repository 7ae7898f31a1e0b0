"""Every command and every code block of the documentation is run, page by page, as a reader would."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.pages import WRITTEN, Block, blocks_of, name_of
from helpers.stages import ELSEWHERE, STAGES
from helpers.walk import ENGINE, Stage, Walk

PAGES = {name_of(path): list(blocks_of(path)) for path in WRITTEN}


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The port of an engine of the tiny model, for every page: starting one is mostly importing torch."""
    with Walk(tmp_path_factory.mktemp("engine"), Stage()) as walk:
        walk.follow(Block("engine", 0, "bash", "", f"{ENGINE} 30000"))
        yield walk.port("30000")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name, blocks in PAGES.items() if blocks and name not in ELSEWHERE])
def test_a_page_works_as_it_is_written(name: str, tmp_path: Path, engine: str) -> None:
    with Walk(tmp_path, STAGES.get(name, Stage()), engine) as walk:
        for block in PAGES[name]:
            walk.follow(block)


def test_stages_are_of_pages_that_have_blocks() -> None:
    assert {*STAGES, *ELSEWHERE} <= {name for name, blocks in PAGES.items() if blocks}
