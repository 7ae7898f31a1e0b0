"""Samples as Parquet and safetensors files: the same records, durable, resumed in any format."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.cli import main
from miles_core.errors import ConfigError
from miles_core.rollout import output, parts
from miles_core.rollout.data import Prompt
from miles_core.rollout.job import Job, to_record
from miles_core.rollout.output import SAMPLES, RunDirectory, encode_line, read_records, read_samples
from miles_core.rollout.parts import part_files, read_part, write_part
from miles_core.session import wire
from miles_core.types import Sample, SampleStatus

BINARY = ("parquet", "safetensors")


def sample(index: int = 0, **fields: Any) -> Sample:
    return Sample(
        **{
            "group_index": index,
            "index": index,
            "prompt": [{"role": "user", "content": "ü \ud83d\ude00 " * index}],
            "tokens": [1, 2, 3 + index],
            "response": "Ja",
            "response_length": 2,
            "loss_mask": [1, 0],
            "rollout_log_probs": [-0.1, 0.0],
            "weight_versions": ["w1"],
            "reward": 0.5,
            "status": SampleStatus.COMPLETED,
            "metadata": {"a": [1, None, {"b": "c"}]},
            **fields,
        }
    )


def record(index: int = 0, **fields: Any) -> dict[str, Any]:
    """A record as it is read from a line."""
    job = Job(Prompt(index, [{"role": "user", "content": "x"}], None, {}, f"{index:016x}"), 0)
    found: dict[str, Any] = json.loads(encode_line(to_record(job, sample(index, **fields), 0, 1)))
    return found


ODD: list[dict[str, Any]] = [
    {},
    {"reward": None, "loss_mask": None, "rollout_log_probs": None, "status": SampleStatus.ABORTED},
    {"reward": {"score": 1.0, "len": 2}, "label": "4"},
    {"reward": 1, "rollout_id": "theirs", "label": {"x": [1.5]}, "weight_versions": [3]},
    {"prompt": "text", "response": "\x00\n", "tokens": [], "response_length": 0, "loss_mask": []},
    {"rollout_routed_experts": np.arange(8, dtype=np.int32).reshape(2, 2, 2), "teacher_log_probs": [-1.0, -2.5]},
    {"rollout_log_probs": [0, -1], "remove_sample": True, "train_metadata": {"w": 2}},
    {"multimodal_train_inputs": {"pixels": np.zeros((2, 2), dtype=np.float32)}},
]


@pytest.mark.parametrize("form", BINARY)
def test_every_record_is_read_as_it_was_written(tmp_path: Path, form: str) -> None:
    records = [{**record(at, **odd), "mine": at, "group_lines": 8} for at, odd in enumerate(ODD)]
    path = write_part(tmp_path, form, records)
    assert path.name == f"samples-00000.{form}"
    assert list(read_part(path)) == records
    assert write_part(tmp_path, form, records[:1]).name == f"samples-00001.{form}"
    assert not list(tmp_path.glob("*.new"))


texts = st.text(st.characters(codec="utf-8"), max_size=5)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("form", BINARY)
@settings(max_examples=60, deadline=None)
@given(
    field=st.sampled_from(
        ["label", "reward", "metadata", "rollout_id", "tokens", "weight_versions", "adapter", "mine"]
    ),
    value=json_values,
)
def test_whatever_a_plugin_left_in_a_field_comes_back(
    tmp_path_factory: pytest.TempPathFactory, form: str, field: str, value: Any
) -> None:
    changed = {**record(), field: value}
    path = write_part(tmp_path_factory.mktemp("part"), form, [changed, record(1)])
    assert list(read_part(path)) == [changed, record(1)]


def test_parquet_has_columns_that_other_tools_read(tmp_path: Path) -> None:
    path = write_part(tmp_path, "parquet", [record(0), record(1, reward=None)])
    columns = ["tokens", "loss_mask", "rollout_log_probs", "reward", "status", "prompt_index"]
    assert pq.read_table(path, columns=columns).to_pydict() == {
        "tokens": [[1, 2, 3], [1, 2, 4]],
        "loss_mask": [[1, 0]] * 2,
        "rollout_log_probs": [[-0.1, 0.0]] * 2,
        "reward": [0.5, None],
        "status": ["completed"] * 2,
        "prompt_index": [0, 1],
    }


def test_safetensors_is_what_sessions_send(tmp_path: Path) -> None:
    experts = np.arange(8, dtype=np.int32).reshape(2, 2, 2)
    path = write_part(tmp_path, "safetensors", [record(0, rollout_routed_experts=experts)])
    (row,) = wire.decode(path.read_bytes()).samples
    assert (row["tokens"].tolist(), row["prompt_index"], row["reward"]) == ([1, 2, 3], 0, 0.5)
    assert (row["rollout_routed_experts"] == experts).all()


async def fill(path: Path, form: str, *numbers: int, close: bool = True) -> RunDirectory:
    directory = RunDirectory(path, {}, output_format=form)
    for number in numbers:
        await directory.append([record(number)])
    if close:
        directory.close()
    return directory


@pytest.mark.parametrize("form", BINARY)
async def test_a_folder_in_any_mixture_of_formats(tmp_path: Path, form: str) -> None:
    await fill(tmp_path, form, 0, 1)
    assert (tmp_path / SAMPLES).read_bytes() == b""
    await fill(tmp_path, "jsonl", 2)
    await fill(tmp_path, form, 3)
    await fill(tmp_path, form)
    assert [file.name for file in part_files(tmp_path)] == [f"samples-00000.{form}", f"samples-00001.{form}"]
    assert list(read_records(tmp_path)) == [record(number) for number in range(4)]
    assert [each.tokens[-1] for each in read_samples(tmp_path)] == [3, 4, 5, 6]


@pytest.mark.parametrize("form", BINARY)
async def test_samples_are_on_disk_before_they_are_a_file(tmp_path: Path, form: str) -> None:
    directory = await fill(tmp_path, form, 0, 1, close=False)
    try:
        assert not part_files(tmp_path)
        assert list(read_records(tmp_path)) == [record(0), record(1)]
    finally:
        directory.close()


async def test_enough_lines_become_a_file_while_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "PART_BYTES", len(encode_line(record(0))) * 3)
    directory = await fill(tmp_path, "safetensors", *range(7), close=False)
    assert len(part_files(tmp_path)) == 2
    assert list(read_records(tmp_path)) == [record(number) for number in range(7)]
    directory.close()
    assert len(part_files(tmp_path)) == 3


@pytest.mark.parametrize("form", BINARY)
async def test_a_crash_between_the_file_and_its_lines_repeats_nothing(tmp_path: Path, form: str) -> None:
    await fill(tmp_path, "jsonl", 0, 1)
    lines = (tmp_path / SAMPLES).read_bytes()
    await fill(tmp_path, form)
    (tmp_path / SAMPLES).write_bytes(lines)
    await fill(tmp_path, form, 2)
    assert list(read_records(tmp_path)) == [record(number) for number in range(3)]


@pytest.mark.parametrize("form", BINARY)
async def test_a_damaged_file_is_named(tmp_path: Path, form: str) -> None:
    await fill(tmp_path, form, 0, 1)
    (file,) = part_files(tmp_path)
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(ConfigError, match=rf"samples-00000\.{form}: damaged"):
        list(read_records(tmp_path))


async def test_other_settings_change_nothing_in_the_folder(tmp_path: Path) -> None:
    await fill(tmp_path, "jsonl", 0)
    with pytest.raises(ConfigError, match="has samples of another run"):
        RunDirectory(tmp_path, {"other": 1}, output_format="parquet")
    assert not part_files(tmp_path)
    await fill(tmp_path, "parquet")
    with pytest.raises(ConfigError, match="has samples of another run"):
        RunDirectory(tmp_path, {"other": 1})
    RunDirectory(tmp_path, {"other": 1}, overwrite=True).close()
    assert list(read_records(tmp_path)) == []


async def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--output-format csv: expected jsonl, parquet, safetensors"):
        RunDirectory(tmp_path, {}, output_format="csv")
    await fill(tmp_path, "parquet", 0)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"parquet needs pyarrow: pip install 'miles-plugins\[data\]'"):
        RunDirectory(tmp_path, {}, output_format="parquet")
    with pytest.raises(ConfigError, match="reading it needs pyarrow"):
        list(read_records(tmp_path))


@pytest.mark.parametrize("form", parts.FORMATS)
async def test_inspect_shows_a_sample_of_each(tmp_path: Path, form: str) -> None:
    await fill(tmp_path, form, 0, 1)
    shown = CliRunner().invoke(main, ["inspect", str(tmp_path), "1", "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout) == record(1)
    assert "no sample 5" in CliRunner().invoke(main, ["inspect", str(tmp_path), "5"]).stderr
