"""Every family reads what it writes: golden completions, as sampled and as history spells them, by token or at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from helpers.golden import golden_family, golden_names, golden_rows
from miles_core.tito import BoundFamily, parse_difference
from miles_core.types import Message

Row = dict[str, Any]

every_file = pytest.mark.parametrize("name", [name for name in golden_names() if name != "default"])


def label(row: Row, index: int) -> str:
    kwargs = "".join(f" {key}={value}" for key, value in row["chat_template_kwargs"].items())
    return f"{row['case']}{kwargs} message {index}"


def sampled(name: str) -> Iterator[tuple[Row, int, str]]:
    """Each completion that the model could have sampled: its row, the message's index, its text."""
    for row in golden_rows(name):
        for completion in row.get("completions", []):
            if completion["text"] is not None and row.get("rendered_hf_tokenizer", row["rendered"]):
                yield row, completion["index"], completion["text"]


def by_token(family: BoundFamily, ids: list[int], tools: Any, kwargs: Any) -> tuple[Message, Message]:
    """The message of a parser fed one id at a time, and what its deltas add up to."""
    parser = family.parser(tools, kwargs)
    deltas = [delta for i in ids for delta in parser.feed([i])] + parser.finish()
    added: Message = {"role": "assistant", "content": "".join(d.get("content", "") for d in deltas)}
    if reasoning := "".join(d.get("reasoning_content", "") for d in deltas):
        added["reasoning_content"] = reasoning
    if calls := [call for d in deltas for call in d.get("tool_calls", [])]:
        assert [call.pop("index") for call in calls] == list(range(len(calls)))
        added["tool_calls"] = [{"id": f"call_{n}", **call} for n, call in enumerate(calls)]
    return parser.message(), added


def written(message: Message, text: str) -> Message:
    """The message without reasoning that the template did not write, as with thinking turned off."""
    reasoning = (message.get("reasoning_content") or message.get("reasoning") or "").strip()
    if reasoning and reasoning not in text:
        return {key: value for key, value in message.items() if key not in ("reasoning_content", "reasoning")}
    return message


def through_the_stop(family: BoundFamily, ids: list[int]) -> list[int]:
    """Without what the template writes behind the stop token."""
    ends = [at for at, i in enumerate(ids, 1) if i in family.stop_ids]
    return ids[: ends[-1]] if ends else ids


def report(faults: list[str]) -> None:
    assert not faults, f"{len(faults)} completions differ:\n\n" + "\n\n".join(faults[:5])


@every_file
def test_a_completion_is_read_as_the_message(name: str) -> None:
    family, faults, seen = golden_family(name), [], 0
    for row, index, text in sampled(name):
        ids = through_the_stop(family, family.encode(text))
        message = written(row["messages"][index], text)
        for kwargs in (None, row["chat_template_kwargs"]):
            read = family.parse(ids, row["tools"], kwargs)
            difference = parse_difference(family.family, message, read)
            if difference is not None:
                faults.append(f"{label(row, index)} (kwargs {kwargs})\n{text!r}\n{message}\n{read}\n{difference}")
            whole, added = by_token(family, ids, row["tools"], kwargs)
            assert whole == read, label(row, index)
            assert added == read, label(row, index)
        seen += 1
    report(faults)
    assert seen > 40 or name == "deepseekv4@recipe"


@every_file
def test_history_is_read_as_the_message(name: str) -> None:
    """What the template writes for a turn, behind the assistant opener and through the stop token."""
    family, faults, seen = golden_family(name), [], 0
    for row in golden_rows(name):
        for index, message in enumerate(row["messages"]):
            if message["role"] != "assistant" or "error" in row:
                continue
            kwargs = family.merge_kwargs(row["chat_template_kwargs"])
            before = family.render(row["messages"][:index], row["tools"], kwargs, False) if index else ""
            through = family.render(row["messages"][: index + 1], row["tools"], kwargs, False)
            opener = family.family.assistant_opener
            assert opener is not None
            if not through.startswith(before) or not through[len(before) :].startswith(opener):
                continue
            turn = through[len(before) + len(opener) :].removeprefix("\n").removeprefix("assistant<|im_middle|>")
            ids = through_the_stop(family, family.encode(turn))
            read = family.parse(ids, row["tools"])
            difference = parse_difference(family.family, written(message, turn), read)
            if difference is not None:
                faults.append(f"{label(row, index)}\n{family.tokenizer.decode(ids)!r}\n{message}\n{read}\n{difference}")
            seen += 1
    report(faults)
    assert seen > 40
