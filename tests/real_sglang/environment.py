"""The environment that SGLang runs in: one folder for each recipe, made once even if several processes want it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import venv
from functools import cache
from pathlib import Path
from types import SimpleNamespace

VERSION = "0.5.23"
HERE = Path(__file__).parent
CACHE = HERE.parents[1] / ".cache" / "sglang"
STAND_INS = HERE / "stand_ins"
TORCH = "torch==2.13.0"
"""Installed with what it needs; everything else is listed whole in `requirements.txt` and installed without."""

IMPORTED = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.qwen3",
)

_LOG_TAIL = 3000


class InstallError(RuntimeError):
    """SGLang could not be installed; the text has the end of the installer's output."""


def reason_to_skip() -> str | None:
    """Why this machine cannot run it; None where it can."""
    here = f"{platform.system()} {platform.machine()}"
    return None if here == "Linux x86_64" else f"SGLang's wheels are for Linux x86_64, and this is {here}"


@cache
def folder() -> Path:
    """The folder of today's recipe: another file of it, or another Python, is another folder."""
    digest = hashlib.sha256(f"{sys.version_info[:2]}{VERSION}{TORCH}".encode())
    for path in sorted([Path(__file__), HERE / "requirements.txt", *STAND_INS.rglob("*.py")]):
        digest.update(path.relative_to(HERE).as_posix().encode() + path.read_bytes())
    return CACHE / digest.hexdigest()[:16]


def python() -> Path:
    """The environment's interpreter, installed now if nobody has. Raises InstallError."""
    path = folder()
    if not _done(path).exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # freed by the system even if this process is killed
            if not _done(path).exists():
                shutil.rmtree(path, ignore_errors=True)  # of a process that was killed
                _install(path)
                _done(path).touch()
    return path / "bin" / "python"


def _done(path: Path) -> Path:
    return path / "installed"


def _install(path: Path) -> None:
    """Two installers at a time: they wait for the index as long as they unpack, and share no package."""
    builder = venv.EnvBuilder(symlinks=True)
    builder.create(path)
    context: SimpleNamespace = builder.ensure_directories(path)
    pip = [sys.executable, "-m", "pip", "--python", str(context.env_exe), "install", "--no-compile", "--quiet"]
    commands = [[*pip, TORCH], [*pip, "--no-deps", "--requirement", str(HERE / "requirements.txt")]]
    environ = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    running = [
        subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    for process, command in zip(running, commands, strict=True):
        output, _ = process.communicate()
        if process.returncode:
            for other in running:
                other.kill()
                other.communicate()
            raise InstallError(f"{' '.join(command)} failed:\n{output[-_LOG_TAIL:]}")
    _put_stand_ins(path)
    # compiles what SGLang imports, once for its three processes, and shows that it can be imported
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [str(context.env_exe), "-c", f"import {', '.join(IMPORTED)}"]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise InstallError(f"SGLang {VERSION} cannot be imported:\n{done.stdout[-_LOG_TAIL:]}")


def _put_stand_ins(path: Path) -> None:
    """Where the real library is not there."""
    (site,) = (path / "lib").glob("python*/site-packages")
    for stand_in in STAND_INS.iterdir():
        name = stand_in.stem
        if stand_in.name != "__pycache__" and not (site / name).exists():
            copy = shutil.copytree if stand_in.is_dir() else shutil.copy
            copy(stand_in, site / stand_in.name)


def forget_others() -> None:
    """Remove the folders of earlier recipes, unless one is just being installed."""
    for other in CACHE.iterdir():
        if other.is_dir() and other != folder():
            shutil.rmtree(other, ignore_errors=True)
            other.with_suffix(".lock").unlink(missing_ok=True)
