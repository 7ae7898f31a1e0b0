"""Prompts from Parquet files and from datasets on disk."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from miles_core.errors import ConfigError
from miles_core.rollout.data import Keys, read_prompts

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "a"}], "label": "1", "metadata": {"n": 1}},
    {
        "messages": [
            {"role": "user", "content": "b"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "x", "tool_call_id": "c"},
        ],
        "label": None,
        "metadata": {"m": [2]},
    },
]


def save_to_disk(folder: Path, tables: list[pa.Table], **state: Any) -> Path:
    """A dataset as Hugging Face's library saves it."""
    folder.mkdir(parents=True)
    names = [f"data-{at:05d}-of-{len(tables):05d}.arrow" for at in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names], **state}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def parquet(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def same_as_lines(path: Path, folder: Path) -> bool:
    """Whether the prompts are those of the rows as JSON lines."""
    lines = folder / "same.jsonl"
    rows = [{**ROWS[0]}, json.loads(json.dumps(ROWS[1]))]
    del rows[1]["messages"][1]["content"]  # null in a column is no value
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_prompts(path) == read_prompts(lines)


def test_a_parquet_file(tmp_path: Path) -> None:
    assert same_as_lines(parquet(tmp_path / "p.parquet"), tmp_path)


def test_a_dataset_on_disk(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    assert same_as_lines(save_to_disk(tmp_path / "set", [table.slice(0, 1), table.slice(1)]), tmp_path)


def test_a_folder_of_parquet_files(tmp_path: Path) -> None:
    schema = pa.Table.from_pylist(ROWS).schema
    for at, row in enumerate(ROWS):
        (tmp_path / "set" / "data").mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist([row], schema=schema), tmp_path / "set" / "data" / f"train-{at}.parquet")
    assert same_as_lines(tmp_path / "set", tmp_path)


def test_the_only_split_of_several_is_taken(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "all" / "train", [pa.Table.from_pylist(ROWS)])
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert same_as_lines(tmp_path / "all", tmp_path)
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["test", "train"]}')
    with pytest.raises(ConfigError, match="has the splits test, train; name one, such as"):
        read_prompts(tmp_path / "all")


def test_columns_of_other_names(tmp_path: Path) -> None:
    rows = [{"question": "a", "answer": "1", "extra": '{"n": 1}', "prompts": "odd", "messages": [{"role": "user"}]}]
    path = parquet(tmp_path / "p.parquet", rows)
    (prompt,) = read_prompts(path, Keys("question", "answer", "extra"))
    assert (prompt.messages, prompt.label) == ([{"role": "user", "content": "a"}], "1")
    assert prompt.metadata == {"n": 1}


def test_keys_of_other_names_in_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"question": "a", "answer": 3}\n{"question": "b"}\n')
    prompts = read_prompts(path, Keys(prompt="question", label="answer"))
    assert [(each.messages[0]["content"], each.label) for each in prompts] == [("a", 3), ("b", None)]
    with pytest.raises(ConfigError, match=r"p.jsonl:1: has no 'query' \(--input-key\); it has question, answer"):
        read_prompts(path, Keys(prompt="query"))


def test_a_row_that_is_no_prompt_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'p.parquet, row 1: "prompt" is a number'):
        read_prompts(parquet(tmp_path / "p.parquet", [{"prompt": None, "messages": [{"role": "user"}]}, {"prompt": 1}]))


def test_what_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.parquet").write_text("no")
    with pytest.raises(ConfigError, match=r"p\.parquet: cannot be read"):
        read_prompts(tmp_path / "p.parquet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no dataset in this folder"):
        read_prompts(tmp_path / "empty")
    save_to_disk(tmp_path / "set", [], _indices_data_files=[{"filename": "i.arrow"}])
    with pytest.raises(ConfigError, match="save it after flatten_indices"):
        read_prompts(tmp_path / "set")
    (tmp_path / "set" / "state.json").write_text("[]")
    with pytest.raises(
        ConfigError, match=r"set/state\.json: not an object; is this a dataset that save_to_disk wrote\?$"
    ):
        read_prompts(tmp_path / "set")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'miles-plugins\[data\]'"):
        read_prompts(tmp_path / "p.parquet")
