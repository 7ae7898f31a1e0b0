"""The command line of the server process, as one frozen object."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn


class ServingError(Exception):
    """What was asked for cannot be served; the text says why and what to do."""


class SettingsError(ServingError):
    """The command line is wrong; the text says which flag and what it accepts."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the server runs; field names are the flags."""

    model: Path
    checkpoint: Path
    tito_model: str
    host: str = "127.0.0.1"
    port: int = 0
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None
    max_batch: int = 64
    max_queue: int | None = None
    cache_tokens: int | None = None
    prefill_chunk: int = 1024
    context_length: int | None = None
    logprobs: str = "scaled"
    weight_version: str = "default"
    served_model_name: str | None = None
    seed: int | None = None
    status_fd: int | None = None
    exit_with_stdin: bool = False


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that the launcher can show the one line that matters."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message}; the engine's own flags are: {', '.join(self.engine_flags())}")

    def engine_flags(self) -> list[str]:
        """The flags a user may pass on, those that the launcher sets itself left out."""
        hidden = ("-h", "--model", "--checkpoint", "--tito-model", "--host", "--port")
        shown = (action for action in self._actions if action.help != argparse.SUPPRESS)
        return sorted(action.option_strings[0] for action in shown if action.option_strings[0] not in hidden)


def parse(argv: Sequence[str]) -> Settings:
    """Read the flags; SettingsError names the flag that is wrong."""
    values = vars(_parser().parse_args(list(argv)))
    return Settings(**values)


def engine_flags() -> list[str]:
    """The flags that `miles-plugins engine --engine local` passes on, as the docs list them."""
    return _parser().engine_flags()


def _parser() -> _Parser:
    parser = _Parser(prog="--engine local", add_help=True, allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True, help="directory with weights and config.json")
    parser.add_argument("--checkpoint", type=Path, required=True, help="directory with the tokenizer")
    parser.add_argument("--tito-model", required=True, help="model family, e.g. qwen3")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    _add_model_flags(parser)
    _add_serving_flags(parser)
    parser.add_argument("--status-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--exit-with-stdin", action="store_true", help=argparse.SUPPRESS)
    return parser


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="auto (cuda if torch has one), cpu, cuda, cuda:1, mps")
    dtypes = ("auto", "float32", "bfloat16", "float16")
    parser.add_argument("--dtype", default="auto", choices=dtypes, help="auto: float32 on CPU, else the model's")
    parser.add_argument("--threads", type=_positive, help="threads torch may use")
    parser.add_argument("--context-length", type=_positive, help="default: what the model's config says")
    parser.add_argument("--seed", type=int, help="of requests that bring none; default: different each time")
    help_ = "scaled: of the temperature-scaled distribution, as SGLang; unscaled: of temperature 1"
    parser.add_argument("--logprobs", default="scaled", choices=("scaled", "unscaled"), help=help_)


def _add_serving_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-batch", type=_positive, default=64, help="requests decoded together (64)")
    parser.add_argument("--max-queue", type=_positive, help="waiting requests above which to answer 503")
    parser.add_argument("--cache-tokens", type=_natural, help="prefix cache size; 0: none; default: by memory")
    parser.add_argument("--prefill-chunk", type=_positive, default=1024, help="prompt tokens per step (1024)")
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--served-model-name", help="what /v1/models calls it; default: the model's path")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {value}")
    return value
