"""`verify session --engine sglang`: random weights, forced into calls that no tokenizer would write so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from real_sglang.launched import ENVIRONMENT, flags


def test_every_event_and_every_token(model: Path) -> None:
    command = [sys.executable, "-m", "miles_core", "verify", "session", "--engine", "sglang", "--model", str(model)]
    command += ["--tito-model", "qwen3", "--cycles", "1", "--max-tokens", "24", "--json", *flags()]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
        encoding="utf-8",
        env={**os.environ, **ENVIRONMENT},
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer["verdict"] == "PASS"
    assert (answer["engine"]["given"], answer["engine"]["serves"]) == ("sglang", str(model))
    assert (answer["engine"]["forced"], answer["engine"]["same_tokenizer"]) == (True, True)
    assert all(event["count"] >= 1 and event["required"] for event in answer["events"])
    assert all(check["passed"] for check in answer["checks"])
    # what is forced is written by no tokenizer, and is kept all the same
    text = answer["assistant_text"]
    assert text["left_out_differing"] > 20
    assert text["differing"] <= text["limit"] * text["counted"]
    rendering = answer["rendering"]
    assert rendering["told_ids"] == rendering["asked"] >= 3
    # of this release's rendering only what is known of it differs, and only where there are tools
    assert set(rendering["otherwise"]) <= {'it adds "defer_loading": null to each tool, as SGLang 0.5.23 does'}
