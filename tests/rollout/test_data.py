"""Reading prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_core.errors import ConfigError
from miles_core.rollout.data import ACCEPTED, digest, read_prompts


def written(tmp_path: Path, text: str | bytes) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return file


def test_every_form_of_a_line(tmp_path: Path) -> None:
    text = (
        '\ufeff{"prompt": "Hi", "label": 3}\r\n\n'
        '{"prompt": [{"role": "user", "content": "Hi"}], "metadata": {"a": 1}}\n'
        '{"messages": [{"role": "system", "content": "x"}], "metadata": null}'
    )
    first, second, third = read_prompts(written(tmp_path, text))
    assert first.messages == second.messages == [{"role": "user", "content": "Hi"}]
    assert (first.label, second.metadata, third.metadata) == (3, {"a": 1}, {})
    assert [each.index for each in (first, second, third)] == [0, 1, 2]
    assert first.hash == second.hash != third.hash
    assert len(first.hash) == 16


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "not JSON: "),
        ("[1]", "a list, not an object"),
        ("3", "a number, not an object"),
        ("{}", 'neither "messages" nor "prompt"'),
        ('{"prompt": "x", "messages": []}', 'both "messages" and "prompt"'),
        ('{"messages": "x"}', '"messages" is a string'),
        ('{"prompt": []}', '"prompt" is an empty list'),
        ('{"messages": [{"content": "x"}]}', '"messages[0]" is not an object with a "role"'),
        ('{"prompt": "x", "metadata": [1]}', '"metadata" is a list, not an object'),
        ('{"prompt": "x", "lable": 1}', "unknown key 'lable', did you mean 'label'?"),
        ('{"prompt": NaN}', "not JSON: "),
    ],
)
def test_an_error_names_file_line_and_what_is_accepted(tmp_path: Path, line: str, what: str) -> None:
    file = written(tmp_path, f'{{"prompt": "fine"}}\n\n{line}\n')
    with pytest.raises(ConfigError) as raised:
        read_prompts(file)
    assert raised.value.message.startswith(f"{file}:3: {what}")
    assert raised.value.message.endswith(ACCEPTED)


def test_bytes_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    file = written(tmp_path, b'{"prompt": "\xff"}')
    with pytest.raises(ConfigError, match=r"prompts.jsonl:1: not JSON"):
        read_prompts(file)


def test_a_missing_or_empty_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--prompts .*none.jsonl: No such file"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="no prompts in it; a line is an object"):
        read_prompts(written(tmp_path, "\n\n"))


def test_other_keys_are_ignored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    read_prompts(written(tmp_path, '{"prompt": "x", "source": "y"}'))
    assert "ignored: source" in caplog.text


def test_the_digest_sees_labels_and_not_spelling(tmp_path: Path) -> None:
    one = digest(read_prompts(written(tmp_path, '{"prompt": "x", "label": 1}')))
    same = digest(read_prompts(written(tmp_path, '\n{"label":1,  "prompt": "x"}')))
    other = digest(read_prompts(written(tmp_path, '{"prompt": "x", "label": 2}')))
    assert one == same != other


def test_an_unknown_role_is_named(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "x"}, {"role": "asistant", "content": "y"}]}')
    with pytest.raises(ConfigError) as raised:
        read_prompts(path)
    text = f"{path}:1: \"messages[1]\" has the unknown role 'asistant'; did you mean 'assistant'?"
    assert raised.value.message == text
