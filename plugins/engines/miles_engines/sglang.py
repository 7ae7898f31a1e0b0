"""SGLang as released (`--engine sglang`): started with the family's parsers, and with the plugins loaded inside it.

It runs in this Python's environment, or in another (`--engine-python`); its processes are watched, started again when
they die, and gone when we are. SGLang is never imported here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from miles_core import hookimpl
from miles_core.engine.base import Engine, EngineConfig
from miles_core.errors import ConfigError, EngineStartError
from miles_engines.sglang_server.bridge import Bridge
from miles_engines.sglang_server.flags import Layout, arguments, split, value, with_address
from miles_engines.sglang_server.supervisor import Say, Supervisor
from miles_engines.sglang_server.worker import Recipe, Worker, free_port

if TYPE_CHECKING:
    from miles_engines.sglang_server.chosen import Chosen

_LOOK = """
import importlib.metadata, importlib.util, json
spec = importlib.util.find_spec("sglang")
version = None
if spec is not None and spec.origin is not None:  # a folder of that name, where the command runs, is no package
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        version = "of an unknown version"
print(json.dumps(version))
"""
_LOOK_TIMEOUT = 60.0

CONFIGS = ("config.json", "params.json")
"""One of them is in every directory that SGLang loads; the second is Mistral's."""


@hookimpl
def launch_engine(config: EngineConfig) -> Engine:
    """Start the servers and wait until each answers `/health`."""
    from miles_engines.sglang_server.chosen import chosen

    own, words = split(config.options)
    config = with_address(config, words)
    layout = Layout.of(words)
    if layout.nodes > 1 and own.workers > 1:
        raise ConfigError(f"--engine-workers {own.workers} --nnodes {layout.nodes}: a worker on several nodes is one")
    check_model(config.model)
    loaded = chosen(config.tito_model, own.plugins)
    check_processes(words, loaded)
    ports = [config.port + n if config.port else free_port(config.host) for n in range(own.workers)]
    lines = [arguments(config, loaded.family, words, port) for port in ports]
    python, version = interpreter(own.python)
    engine = SGLangEngine(config, loaded, layout, Start(python, version, ports, lines))
    try:
        engine.start()
    except BaseException:
        engine.close()
        raise
    return engine


def check_model(model: str) -> None:
    """Raise ConfigError for a path that holds no model: SGLang itself takes long before it says so."""
    path = Path(model)
    if not path.exists() and (path.is_absolute() or model.startswith((".", "~"))):
        raise ConfigError(f"--model {model}: there is no such directory")
    if path.is_dir() and not any((path / name).exists() for name in CONFIGS):
        raise ConfigError(f"--model {model}: no config.json in this directory; give the one of a checkpoint")


def check_processes(words: Sequence[str], loaded: Chosen) -> None:
    """Raise ConfigError where SGLang would parse calls in processes that load no plugins."""
    count = value(words, "--tokenizer-worker-num")
    if loaded.plugins and count not in (None, "1"):
        raise ConfigError(
            f"--tokenizer-worker-num {count}: SGLang loads no plugins in those processes, and "
            f"{loaded.plugins[0].describe()} has something for them; leave it out"
        )


@dataclass(frozen=True)
class Start:
    """SGLang's interpreter and version; the port and the arguments of each worker."""

    python: str
    version: str
    ports: Sequence[int]
    arguments: Sequence[Sequence[str]]


class SGLangEngine:
    """SGLang's servers on this machine. They end when closed, and by themselves when this process ends."""

    def __init__(self, config: EngineConfig, loaded: Chosen, layout: Layout, start: Start) -> None:
        self._say: Say = config.progress or (lambda line: None)
        self._layout = layout
        self._start = start
        self._model = config.model
        self._parsers = loaded.parsers
        placed = [devices(config, start, layout, index) for index in range(len(start.ports))]
        self.workers = [_worker(config, loaded, start, index, environ) for index, environ in enumerate(placed)]
        self._supervisor = Supervisor(self.workers, self._say)

    @property
    def urls(self) -> tuple[str, ...]:
        """A base URL for each worker; none where another node has the server."""
        return () if self._layout.rank else tuple(worker.recipe.url for worker in self.workers)

    def alive(self) -> bool:
        """Whether a worker serves, or is being started again."""
        return self._supervisor.alive()

    def start(self) -> None:
        """Start the workers and wait for all. Raises EngineStartError, or PluginContractError naming a plugin."""
        self._say(f"SGLang {self._start.version} of {self._start.python} with {self._model}, {self._parsers}")
        for worker in self.workers:
            self._say(f"the log of {worker.recipe.name} at {worker.recipe.url} is {worker.recipe.log}")
        self._supervisor.start()

    def close(self) -> None:
        """Stop every process; may be called twice."""
        self._supervisor.close()


def _worker(config: EngineConfig, loaded: Chosen, start: Start, index: int, placed: Mapping[str, str]) -> Worker:
    words = start.arguments[index]
    bridge = Bridge(loaded.plugins, words) if loaded.plugins else None
    environ = {**os.environ, **config.environment, **placed}
    environ["PATH"] = os.pathsep.join(filter(None, [str(Path(start.python).parent), environ.get("PATH")]))
    environ["PYTHONUNBUFFERED"] = "1"
    if bridge is not None:
        environ |= bridge.environment(environ)
    recipe = Recipe(
        name="sglang" if len(start.ports) == 1 else f"sglang worker {index}",
        command=[start.python, "-m", "sglang.launch_server", *words],
        environ=environ,
        log=_log(config.log_file, index),
        host=config.host,
        port=start.ports[index],
        patience=config.start_timeout,
    )
    return Worker(recipe, bridge)


def devices(config: EngineConfig, start: Start, layout: Layout, index: int) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of one of several workers. Raises ConfigError if there are too few."""
    if len(start.ports) == 1 or value(start.arguments[index], "--device") == "cpu":
        return {}
    visible = {**os.environ, **config.environment}.get("CUDA_VISIBLE_DEVICES")
    gpus = layout.gpus
    first, end = index * gpus, (index + 1) * gpus
    if visible is None:
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(first, end)))}
    mine = visible.split(",")[first:end]
    if len(mine) < gpus:
        raise ConfigError(
            f"--engine-workers: worker {index} takes {gpus} GPUs, and CUDA_VISIBLE_DEVICES={visible} has no more"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(mine)}


def interpreter(given: str | None) -> tuple[str, str]:
    """The Python that has SGLang, and SGLang's version. Raises EngineStartError with what to install."""
    python = given or sys.executable
    path = shutil.which(python)
    if path is None:
        raise ConfigError(
            f"--engine-python {python}: there is no such program; give the python of SGLang's environment"
        )
    try:
        done = subprocess.run(
            [path, "-c", _LOOK], capture_output=True, text=True, timeout=_LOOK_TIMEOUT, stdin=subprocess.DEVNULL
        )
        version = json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--engine-python {python}: cannot be run as a Python: {error}") from error
    if done.returncode:
        said = done.stderr.split("\n") or [""]
        reason = next((line.strip() for line in reversed(said) if line.strip()), f"exit code {done.returncode}")
        raise ConfigError(f"--engine-python {python}: cannot be run as a Python: {reason[:500]}")
    if version is None:
        install = "pip install 'miles-plugins[sglang]'" if given is None else f"{path} -m pip install 'sglang>=0.5.23'"
        other = ", or name the Python of an environment that has it with --engine-python" if given is None else ""
        raise EngineStartError(f"engine sglang needs SGLang, which {path} does not have: {install}{other}")
    return os.path.abspath(path), str(version)  # links stay: they are how a virtual environment is told


def _log(given: Path | None, index: int) -> Path:
    """A file that is there for good: whoever is told of it may look later."""
    if given is not None:
        return given.with_stem(f"{given.stem}-{index}") if index else given
    handle, name = tempfile.mkstemp(prefix="miles-engine-sglang-", suffix=".log")
    os.close(handle)
    return Path(name)
