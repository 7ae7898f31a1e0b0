"""What keeps the built-in engine from starting, and what the error says."""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny import write_tokenizer
from miles_core.engine.base import EngineConfig
from miles_core.errors import EngineStartError
from miles_engines import local
from miles_engines.local import launch_engine
from miles_engines.local_server import model as models
from miles_engines.local_server.settings import Settings, SettingsError, engine_flags, parse


def config(directory: Path, **values: Any) -> EngineConfig:
    settings = {"model": str(directory), "checkpoint": str(directory), "tito_model": "qwen3", **values}
    return EngineConfig(**settings)


def failure(given: EngineConfig) -> str:
    with pytest.raises(EngineStartError) as caught:
        launch_engine(given)
    return caught.value.message


def test_torch_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else real(name))
    assert failure(config(tmp_path)) == (
        f"engine local needs torch, which this Python ({sys.executable}) does not have: "
        "pip install 'miles-plugins[local]'"
    )


def test_no_such_directory(tmp_path: Path) -> None:
    missing = tmp_path / "Qwen3-0.6B"
    assert failure(config(missing)) == (
        f"--model {missing}: does not exist; engine local reads models from disk. "
        "Download one first, e.g.: hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B"
    )


def test_a_file_in_its_place(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    assert "is a file, not a directory" in failure(config(file))


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    text = f"--model {tmp_path}: has no config.json; is it the directory of a transformers model?"
    assert failure(config(tmp_path)) == text


def test_a_log_that_cannot_be_written(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    text = failure(config(tiny, log_file=tmp_path / "file" / "engine.log"))
    assert text.startswith(f"cannot write the engine's log {tmp_path}/file/engine.log: ")


def test_a_flag_it_does_not_know(tiny: Path) -> None:
    text = failure(config(tiny, options=("--max-bacth", "3")))
    assert "unrecognized arguments: --max-bacth 3; the engine's own flags are: --cache-tokens, --context-length" in text


def test_a_port_in_use(tiny: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in failure(config(tiny, port=port))


def test_too_little_time(tiny: Path) -> None:
    text = failure(config(tiny, start_timeout=0.05))
    assert text.startswith(f"engine local ({tiny}) did not start within 0.05 s")


def test_weights_that_cannot_be_read(tiny: Path, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    log = tmp_path / "engine.log"
    text = failure(config(tmp_path, log_file=log))
    assert text.startswith(f"engine local ({tmp_path}) did not start: SafetensorError: ")
    assert f"The end of {log}:" in text
    assert text.count("header too large") > 1


@pytest.mark.parametrize("kind", ["qwen3_next", "nemotron_h"])
def test_layers_that_cannot_be_batched(tmp_path: Path, kind: str) -> None:
    facts = {"model_type": kind, "num_hidden_layers": 4, "hidden_size": 32, "layers_block_type": ["mamba", "attention"]}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    settings = Settings(model=tmp_path, checkpoint=tmp_path, tito_model="qwen3", device="cpu")
    with pytest.raises(models.ModelError, match="it serves attention-only models"):
        models.load(settings, lambda text: None)


def test_a_device_that_torch_lacks(tiny: Path) -> None:
    settings = Settings(model=tiny, checkpoint=tiny, tito_model="qwen3", device="abacus")
    with pytest.raises(models.ModelError, match=r"--device abacus: torch .* has no such device"):
        models.load(settings, lambda text: None)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--max-batch", "0"), "argument --max-batch: must be at least 1, got 0"),
        (("--cache-tokens", "-1"), "argument --cache-tokens: must be at least 0, got -1"),
        (("--logprobs", "none"), "argument --logprobs: invalid choice: 'none'"),
    ],
)
def test_flags_are_checked(flags: tuple[str, ...], text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        parse(["--model", "m", "--checkpoint", "c", "--tito-model", "qwen3", *flags])


def test_every_flag_is_in_the_docs() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    assert [flag for flag in engine_flags() if f"| `{flag}` |" not in docs] == []
    assert "--logprobs" in engine_flags()
    assert "--status-fd" not in engine_flags()


def test_the_plugin_imports_nothing_heavy() -> None:
    assert {"torch", "transformers", "aiohttp"}.isdisjoint(vars(local))
