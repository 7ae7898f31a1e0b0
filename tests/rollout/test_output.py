"""The output folder: durable lines, torn ends, foreign runs, and the published schema."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from miles_core.errors import ConfigError
from miles_core.rollout.data import Prompt
from miles_core.rollout.job import Job, new_sample, to_record
from miles_core.rollout.output import SAMPLES, RunDirectory, encode_line, read_records, read_samples
from miles_core.types import Sample, SampleStatus

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/schemas/sample.schema.json").read_text())

PROMPT = Prompt(0, [{"role": "user", "content": "Hi"}], None, {}, "0123456789abcdef")


def sample(**fields: Any) -> Sample:
    made = new_sample(Job(PROMPT, 0), 1)
    made.tokens, made.response_length = [1, 2, 3], 2
    made.loss_mask, made.rollout_log_probs = [1, 0], [-0.5, 0.0]
    made.status = SampleStatus.COMPLETED
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def record(sample_index: int = 0, leaf_index: int = 0, leaf_count: int = 1, **fields: Any) -> dict[str, Any]:
    return to_record(Job(PROMPT, sample_index), sample(**fields), leaf_index, leaf_count)


async def fill(path: Path, *groups: list[dict[str, Any]], settings: dict[str, Any] | None = None) -> None:
    directory = RunDirectory(path, settings or {})
    await asyncio.gather(*(directory.append(group) for group in groups))
    directory.close()


def opened(path: Path, settings: dict[str, Any] | None = None, **more: Any) -> int:
    """Open and close; how many samples are there."""
    directory = RunDirectory(path, settings or {}, **more)
    try:
        return sum(1 for _ in directory.records())
    finally:
        directory.close()


async def test_a_line_is_on_disk_when_append_returns(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "new" / "run", {})
    await directory.append([record()])
    assert [each["tokens"] for each in read_records(directory.path)] == [[1, 2, 3]]
    directory.close()
    directory.close()


async def test_many_at_once_are_whole_lines(tmp_path: Path) -> None:
    await fill(tmp_path, *([record(at, leaf, 3) for leaf in range(3)] for at in range(50)))
    found = [(each["sample_index"], each["leaf_index"]) for each in read_records(tmp_path)]
    assert sorted(found) == [(at, leaf) for at in range(50) for leaf in range(3)]
    assert all(found[at][0] == found[at + 1][0] == found[at + 2][0] for at in range(0, 150, 3))


async def test_a_cancelled_append_is_written_at_close(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, {})
    async with directory._lock:
        task = asyncio.create_task(directory.append([record()]))
        await asyncio.wait([task], timeout=0)
        task.cancel()
        await asyncio.wait([task])
    directory.close()
    assert opened(tmp_path) == 1


async def test_a_torn_line_is_cut_off_at_every_byte(tmp_path: Path) -> None:
    await fill(tmp_path, [record(0)])
    whole = (tmp_path / SAMPLES).read_bytes()
    for cut in {1, 2, len(whole) // 2, len(whole) - 1}:
        (tmp_path / SAMPLES).write_bytes(whole + whole[:cut])
        assert opened(tmp_path) == 1
        assert (tmp_path / SAMPLES).read_bytes() == whole


async def test_siblings_are_kept_together_or_not_at_all(tmp_path: Path) -> None:
    await fill(tmp_path, [record(0)])
    whole = (tmp_path / SAMPLES).read_bytes()
    with (tmp_path / SAMPLES).open("ab") as file:
        file.write(encode_line(record(1, 0, 3)) + encode_line(record(1, 1, 3)))
    assert opened(tmp_path) == 1
    assert (tmp_path / SAMPLES).read_bytes() == whole


async def test_damage_in_the_middle_is_named_and_nothing_is_cut(tmp_path: Path) -> None:
    await fill(tmp_path, [record(0)], [record(1)])
    lines = (tmp_path / SAMPLES).read_bytes().splitlines(keepends=True)
    (tmp_path / SAMPLES).write_bytes(lines[0] + b"{oops\n" + lines[1])
    with pytest.raises(ConfigError, match=r"samples.jsonl:2: damaged"):
        opened(tmp_path)
    assert (tmp_path / SAMPLES).read_bytes() == lines[0] + b"{oops\n" + lines[1]


async def test_another_runs_settings_are_named(tmp_path: Path) -> None:
    await fill(tmp_path, [record()], settings={"seed": 1, "agent": "a"})
    with pytest.raises(ConfigError, match=r"samples of another run \(seed was 1, now 2\)[\s\S]*--overwrite"):
        opened(tmp_path, {"seed": 2, "agent": "a"})
    assert opened(tmp_path, {"seed": 1, "agent": "a"}) == 1
    assert opened(tmp_path, {"seed": 2}, overwrite=True) == 0
    assert opened(tmp_path, {"seed": 3}) == 0, "nothing to mix with"


def test_samples_without_their_run_are_refused(tmp_path: Path) -> None:
    (tmp_path / SAMPLES).write_bytes(encode_line(record()))
    with pytest.raises(ConfigError, match=r"has samples.jsonl without run.json"):
        opened(tmp_path)


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, {})
    with pytest.raises(ConfigError, match="another process is writing to it"):
        opened(tmp_path)
    directory.close()
    assert opened(tmp_path) == 0


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--output .*file: cannot be written"):
        opened(tmp_path / "file")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("nan")])
def test_nan_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ValueError, match="field 'reward' cannot be written as JSON"):
        encode_line(record(reward=value))
    with pytest.raises(TypeError, match="field 'metadata' cannot be written as JSON: object is not JSON"):
        encode_line(record(metadata={"x": object()}))


def test_experts_are_dtype_shape_and_base64() -> None:
    experts = np.arange(8, dtype=np.int32).reshape(2, 2, 2)
    line = json.loads(encode_line(record(rollout_routed_experts=experts)))["rollout_routed_experts"]
    assert (line["dtype"], line["shape"]) == ("int32", [2, 2, 2])
    back = np.frombuffer(base64.b64decode(line["base64"]), dtype=line["dtype"]).reshape(line["shape"])
    assert np.array_equal(back, experts)


def test_arrays_of_tokens_become_lists_and_own_attributes_are_written() -> None:
    line = json.loads(encode_line(record(tokens=np.array([1, 2, 3]), own=np.int64(3))))
    assert (line["tokens"], line["own"]) == ([1, 2, 3], 3)


def test_the_schema_describes_every_field() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert set(record()) == set(SCHEMA["properties"]) == set(SCHEMA["required"])


EXPERTS = np.zeros((2, 1, 1), np.int32)


@pytest.mark.parametrize("fields", [{}, {"rollout_routed_experts": EXPERTS}, {"reward": {"a": 1}}])
def test_lines_keep_the_schema(fields: dict[str, Any]) -> None:
    jsonschema.validate(json.loads(encode_line(record(**fields))), SCHEMA)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_something_else_is_refused(tmp_path: Path, overwrite: bool) -> None:
    for name in ("a.txt", "b.txt", "c.txt", "d.txt"):
        (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError) as raised:
        RunDirectory(tmp_path, {}, overwrite=overwrite)
    assert raised.value.message == (
        f"--output {tmp_path}: is not empty, and holds no rollout (there is a.txt, b.txt, c.txt and 1 more); "
        "choose a new or an empty folder"
    )
    assert len(list(tmp_path.iterdir())) == 4


async def test_samples_are_read_as_they_were(tmp_path: Path) -> None:
    prompt = Prompt(0, [{"role": "user", "content": "x"}], "l", {"k": 1}, "0" * 16)
    sample = new_sample(Job(prompt, 1), 2)
    sample.tokens, sample.response_length, sample.status = [1, 2, 3], 1, SampleStatus.COMPLETED
    sample.rollout_routed_experts = np.arange(4, dtype=np.int32).reshape(2, 1, 2)
    directory = RunDirectory(tmp_path, {})
    await directory.append([to_record(Job(prompt, 1), sample, 0, 1)])
    directory.close()
    (read,) = read_samples(tmp_path)
    assert read.prompt_hash == prompt.hash  # type: ignore[attr-defined]
    assert (read.rollout_routed_experts == sample.rollout_routed_experts).all()
    assert (read.tokens, read.status, read.index, read.metadata) == ([1, 2, 3], SampleStatus.COMPLETED, 1, {"k": 1})
