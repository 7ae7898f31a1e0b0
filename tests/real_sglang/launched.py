"""Launching it: small flags for the CPU, and a plugin that notes where it ran."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from real_sglang.environment import python
from real_sglang.model import CONTEXT

ENVIRONMENT: Mapping[str, str] = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}

NOTING = "noting_plugin"
"""The module that `write_noting_plugin` writes; as a plugin, `noting_plugin.plugin`."""

_SOURCE = """
import os
from pathlib import Path

from miles_core.engine.sglang_parsers import register_tool_call_parser
from miles_core.tito import JsonCalls, ParseFacts

RAN = Path(__file__).with_name("ran")


class Plugin:
    def configure_sglang(self, server_args):
        register_tool_call_parser("noting", ParseFacts(calls=JsonCalls()))
        with open(RAN, "a") as file:
            file.write(f"{os.getpid()} {server_args.tool_call_parser} {server_args.context_length}\\n")


plugin = Plugin()
"""


def write_noting_plugin(folder: Path) -> Path:
    """A third party's plugin; the file that it notes each process in, with two of SGLang's flags."""
    (folder / f"{NOTING}.py").write_text(_SOURCE, "utf-8")
    return folder / "ran"


def flags() -> tuple[str, ...]:
    """Flags for `--engine sglang`: an idle server that takes little, ready as soon as it can answer.

    The fraction is of memory that other processes take from too; what is reserved is told by the number of tokens.
    """
    return (
        "--engine-python", str(python()), "--device", "cpu", "--dtype", "float32",
        "--attention-backend", "torch_native", "--mem-fraction-static", "0.5", "--max-total-tokens", "16384",
        "--context-length", str(CONTEXT), "--skip-server-warmup", "--sleep-on-idle",
    )  # fmt: skip
