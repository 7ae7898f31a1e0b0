"""Every command and every code block of the documentation is run, page by page, as a reader would."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.pages import WRITTEN, blocks_of, name_of
from helpers.stages import ELSEWHERE, STAGES
from helpers.walk import Stage, Walk

PAGES = {name_of(path): list(blocks_of(path)) for path in WRITTEN}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name, blocks in PAGES.items() if blocks and name not in ELSEWHERE])
def test_a_page_works_as_it_is_written(name: str, tmp_path: Path) -> None:
    with Walk(tmp_path, STAGES.get(name, Stage())) as walk:
        for block in PAGES[name]:
            walk.follow(block)


def test_stages_are_of_pages_that_have_blocks() -> None:
    assert {*STAGES, *ELSEWHERE} <= {name for name, blocks in PAGES.items() if blocks}
