"""Hand-made distributions in a temporary directory, and the real command run against them alone."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core"


def entry_points(groups: Mapping[str, Mapping[str, str]]) -> str:
    """The text of an entry_points.txt."""
    lines = []
    for group, entries in groups.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()), ""]
    return "\n".join(lines)


def distribution(
    directory: Path,
    name: str,
    version: str = "1.0",
    *,
    agents: Mapping[str, str] | None = None,
    groups: Mapping[str, Mapping[str, str]] | None = None,
    metadata: str | None = None,
    suffix: str = ".dist-info",
    raw: bytes | None = None,
) -> Path:
    """Write a metadata directory and return it.

    `agents` is short for the group `miles.agents`; `metadata` and `raw` replace the whole METADATA and
    entry_points.txt.
    """
    stem = name.replace("-", "_")
    info = directory / (f"{stem}-{version}{suffix}" if suffix == ".dist-info" else f"{stem}{suffix}")
    info.mkdir(parents=True)
    text = entry_points({**({"miles.agents": agents} if agents else {}), **(groups or {})})
    (info / "entry_points.txt").write_bytes(text.encode() if raw is None else raw)
    if metadata is None:
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nA description.\nName: not this\n"
    (info / ("METADATA" if suffix == ".dist-info" else "PKG-INFO")).write_text(metadata)
    return info


def module(directory: Path, name: str, source: str) -> Path:
    """Write a module (`a.b` makes a package) and return its file."""
    file = directory.joinpath(*name.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True, exist_ok=True)
    for package in file.parents:
        if package == directory:
            break
        (package / "__init__.py").touch()
    file.write_text(source)
    return file


AGENT = "async def run_agent(base_url, prompt, request_kwargs, metadata):\n    return None\n"
"""A whole agent module."""


@dataclass
class Site:
    """A directory of packages, the only one that a command run by it can see besides ours."""

    path: Path

    def run(
        self,
        *arguments: str,
        path: Sequence[Path | str] = (),
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run `miles-plugins` with `arguments`; `path` goes before the site's own directory."""
        return subprocess.run(
            [sys.executable, "-S", "-m", "miles_core", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=cwd or self.path,
            env={**self.env(path), **(environ or {})},
        )

    def env(self, path: Sequence[Path | str] = ()) -> dict[str, str]:
        """The environment of a process that sees `path`, the site, this project and the libraries."""
        places = [*map(str, path), str(self.path), str(CORE), str(self.libraries())]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MILES_")}
        return {**clean, "PYTHONPATH": os.pathsep.join(places)}

    def libraries(self) -> Path:
        """Links to what is installed, without the metadata, so that no plugin installed here is seen."""
        links = self.path.parent / "libraries"
        if not links.exists():
            links.mkdir()
            for installed in Path(sysconfig.get_path("purelib")).iterdir():
                if installed.suffix not in (".dist-info", ".egg-info", ".pth"):
                    (links / installed.name).symlink_to(installed)
        return links
