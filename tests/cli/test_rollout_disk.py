"""A disk that fills up in the middle of a rollout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from helpers.fake_sessions import FakeSessions, serving_in_thread


def test_a_full_disk_is_one_clear_sentence_and_the_samples_are_kept(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": f"What is {n} + 1?", "label": str(n + 1)}) + "\n" for n in range(200))
    )
    output = tmp_path / "out"
    with serving_in_thread(FakeSessions()) as url:
        # bytes that a file of the process may have, as a disk that is full
        limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))"
        code = f"{limit}; from miles_core.cli import main; main(prog_name='miles-plugins')"
        command = [sys.executable, "-c", code, "rollout", "--prompts", str(prompts), "--agent", "calculator"]
        command += ["--session-server-url", url, "--output", str(output), "--no-progress", "--concurrency", "4"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1, done.stderr[-2000:]
    assert f"--output {output}: cannot be written: File too large; finished samples are kept" in done.stderr
    assert "Traceback" not in done.stderr
    whole = [line for line in (output / "samples.jsonl").read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    assert whole
    assert all(json.loads(line)["tokens"] for line in whole)
