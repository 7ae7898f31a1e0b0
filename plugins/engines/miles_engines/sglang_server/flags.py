"""Flags of the engine `sglang`: a few of our own, and SGLang's, which pass through as they are.

What we set ourselves (model, address, parsers) may be given once more, and must then say the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from miles_core.engine.base import EngineConfig
from miles_core.errors import ConfigError
from miles_core.tito import TitoFamily

SAME = {
    "--model-path": ("--model",),
    "--tokenizer-path": (),
    "--host": (),
    "--port": (),
    "--api-key": (),
    "--reasoning-parser": (),
    "--tool-call-parser": (),
}
"""SGLang's flags that we set, with SGLang's other names for them."""

SIZES = {
    "tensor": ("--tp-size", "--tp", "--tensor-parallel-size"),
    "pipeline": ("--pp-size", "--pp", "--pipeline-parallel-size"),
    "data": ("--dp-size", "--dp", "--data-parallel-size"),
    "nodes": ("--nnodes",),
    "rank": ("--node-rank",),
}
"""SGLang's flags that say which devices it takes, and where it stands among several nodes."""

SHORTEST_PREFIX = 8
"""SGLang's parser takes a beginning of a flag for the flag; so short a beginning is another flag's name."""


@dataclass(frozen=True)
class OwnFlags:
    """Our own flags: SGLang's interpreter (None: this one), how many workers, further plugins."""

    python: str | None
    workers: int
    plugins: tuple[str, ...]


def split(options: Sequence[str]) -> tuple[OwnFlags, tuple[str, ...]]:
    """Our own flags, and SGLang's in the order given. Raises ConfigError."""
    parser = own_parser()
    try:
        own, rest = parser.parse_known_args([word for word in options if word != "--"])
    except argparse.ArgumentError as error:
        raise ConfigError(f"engine sglang: {error}") from error
    if own.engine_workers < 1:
        raise ConfigError(f"--engine-workers {own.engine_workers}: expected 1 or more")
    return OwnFlags(own.engine_python, own.engine_workers, tuple(own.plugin)), tuple(rest)


def own_parser() -> argparse.ArgumentParser:
    """The flags that are ours."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--engine-python", metavar="PATH", help="the Python that has SGLang; default: this one")
    parser.add_argument("--engine-workers", metavar="N", type=int, default=1, help="how many SGLang servers to start")
    parser.add_argument("--plugin", metavar="NAME", action="append", default=[], help="load its configure_sglang too")
    return parser


def value(words: Sequence[str], *names: str) -> str | None:
    """What the last of SGLang's flags of these names was given; None if none was."""
    found = None
    for at, word in enumerate(words):
        name, equals, text = word.partition("=")
        if name in names or (len(name) >= SHORTEST_PREFIX and any(full.startswith(name) for full in names)):
            found = text if equals else words[at + 1] if at + 1 < len(words) else ""
    return found


def without(words: Sequence[str], *names: str) -> list[str]:
    """The words but for flags of these names and their values."""
    kept: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word in names:
            skip = True
        elif word.partition("=")[0] not in names:
            kept.append(word)
    return kept


def size(words: Sequence[str], what: str, default: int = 1) -> int:
    """One of `SIZES`, as a number. Raises ConfigError."""
    text = value(words, *SIZES[what])
    try:
        return default if text is None else int(text)
    except ValueError:
        raise ConfigError(f"{SIZES[what][0]} {text}: expected a number") from None


@dataclass(frozen=True)
class Layout:
    """How many GPUs of this machine one worker takes, and where this machine stands among several."""

    gpus: int
    nodes: int
    rank: int

    @classmethod
    def of(cls, words: Sequence[str]) -> Layout:
        """From SGLang's flags. Raises ConfigError."""
        gpus = size(words, "tensor") * size(words, "pipeline")
        if "--enable-dp-attention" not in words:
            gpus *= size(words, "data")
        nodes, rank = size(words, "nodes"), size(words, "rank", 0)
        return cls(max(1, gpus // max(1, nodes)), nodes, rank)


def with_address(config: EngineConfig, words: Sequence[str]) -> EngineConfig:
    """The address as SGLang's flags have it, where our own leave it open. Raises ConfigError for no number."""
    host, port = value(words, "--host"), value(words, "--port")
    if port is not None and not port.isdecimal():
        raise ConfigError(f"--port {port}: expected a number")
    return replace(
        config,
        host=host if host and config.host == EngineConfig.host else config.host,
        port=config.port or int(port or 0),
    )


def check_same(words: Sequence[str], ours: Mapping[str, tuple[str | None, str]]) -> None:
    """Raise ConfigError where SGLang's flags contradict what we set.

    `ours` has the value of each flag, None for one that we leave alone, and in words whose it is.
    """
    for flag, (expected, whose) in ours.items():
        given = value(words, flag, *SAME[flag])
        if given is not None and expected is not None and given != expected:
            raise ConfigError(f"{flag} {given} contradicts {whose}, which is {expected}: leave {flag} out")


def arguments(config: EngineConfig, family: TitoFamily, words: Sequence[str], port: int) -> list[str]:
    """The whole command line of one SGLang server, behind `python -m sglang.launch_server`. Raises ConfigError."""
    selector = config.tito_model
    tokenizer = config.checkpoint if config.checkpoint != config.model else None
    ours = {
        "--model-path": (config.model, "--model"),
        "--tokenizer-path": (config.checkpoint, "--checkpoint"),
        "--host": (config.host, "our --host"),
        "--port": (str(config.port) if config.port else None, "our --port"),
        "--api-key": (config.api_key, "--engine-api-key"),
        "--reasoning-parser": (family.reasoning_parser, f"the reasoning parser of --tito-model {selector}"),
        "--tool-call-parser": (family.tool_call_parser, f"the tool-call parser of --tito-model {selector}"),
    }
    check_same(words, ours)
    given = {
        **{flag: expected for flag, (expected, _) in ours.items()},
        "--tokenizer-path": tokenizer,
        "--port": str(port),
    }
    own = [word for flag, text in given.items() if text is not None for word in (flag, text)]
    names = [name for flag, text in given.items() if text is not None for name in (flag, *SAME[flag])]
    return [*own, *without(words, *names)]
