"""A package `sglang` that starts, loads plugins, serves `/health` and dies as SGLang does, in a moment.

Like SGLang it is a server and a child named `sglang::scheduler`, each loading the entry-point group
`sglang.srt.plugins` and swallowing its errors. Words on its command line, besides the flags that it knows, say what
goes wrong.
"""

from __future__ import annotations

from pathlib import Path

from helpers.distributions import distribution, module

PLUGINS = """
import importlib.metadata
import traceback


def load_plugins():
    for entry_point in importlib.metadata.entry_points(group="sglang.srt.plugins"):
        try:
            entry_point.load()()
        except Exception:
            traceback.print_exc()
"""

SERVER_ARGS = """
import sys


class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        for flag in ("model-path", "tokenizer-path", "host", "api-key"):
            parser.add_argument(f"--{flag}")
        parser.add_argument("--port", type=int, default=30000)
        parser.add_argument("--tp-size", "--tp", type=int, default=1)
        parser.add_argument("--reasoning-parser", choices=["qwen3", "kimi_k2", "glm45"])
        calls = ["qwen25", "kimi_k2", "glm47", *sys.modules.get("fake_parsers", ())]
        parser.add_argument("--tool-call-parser", choices=calls)
        parser.add_argument("--device", default="cuda")
        parser.add_argument("--nnodes", type=int, default=1)
        parser.add_argument("--node-rank", type=int, default=0)
        parser.add_argument("--fault", action="append", default=[])
        parser.add_argument("--pids")
        parser.add_argument("--mem-fraction-static", type=float)
        parser.add_argument("--context-length", type=int)
        parser.add_argument("--dist-init-addr")
"""

LAUNCH_SERVER = """
import argparse
import http.server
import os
import subprocess
import sys
import time

from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

SCHEDULER = "import sys, time; from sglang.srt.plugins import load_plugins; {}; print(chr(46)); time.sleep(600)"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *args):
        pass


if __name__ == "__main__":
    load_plugins()
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    args = parser.parse_args()
    print("args", *sys.argv[1:], flush=True)
    print("devices", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
    if "load" in args.fault:
        sys.exit("RuntimeError: no memory for the weights")
    if "hang" in args.fault:
        time.sleep(600)
    load = "pass" if "blind" in args.fault else "load_plugins()"
    scheduler = subprocess.Popen(
        ["sglang::scheduler", "-c", SCHEDULER.format(load)], executable=sys.executable, stdout=subprocess.PIPE,
        start_new_session=True,  # as an orphan it would be in nobody's group
    )
    if not scheduler.stdout.readline():
        sys.exit("the scheduler ended")
    server = http.server.ThreadingHTTPServer((args.host, args.port), Handler)
    if args.pids:
        with open(args.pids, "a") as file:
            print(os.getpid(), scheduler.pid, file=file, flush=True)
    server.timeout = 0.1
    while scheduler.poll() is None:
        server.handle_request()
    print("Subprocess scheduler crashed", flush=True)
    os._exit(1)
"""


def write_fake_sglang(folder: Path, version: str = "0.5.23") -> Path:
    """The package with its metadata, for PYTHONPATH."""
    distribution(folder, "sglang", version)
    module(folder, "sglang.srt.plugins.__init__", PLUGINS)
    module(folder, "sglang.srt.server_args", SERVER_ARGS)
    module(folder, "sglang.launch_server", LAUNCH_SERVER)
    return folder
