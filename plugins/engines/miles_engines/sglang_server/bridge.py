"""The folder that carries plugins into SGLang's processes, whatever environment they have.

SGLang (0.5.23) loads the entry-point group `sglang.srt.plugins` in each of its processes. The folder goes on its
PYTHONPATH with such an entry point, and says which plugins to call and where their packages lie. So nothing of ours has
to be installed there, and an SGLang that somebody else starts never sees us. Each process leaves a note there.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_engines.sglang_server import bridge_module

if TYPE_CHECKING:
    from miles_core.plugins import Plugin

ENTRY_POINT = "miles"
"""Its name in SGLang's log, and in SGLANG_PLUGINS."""

MODULE = "miles_sglang_bridge"
CONFIGURE = "miles_engines.sglang_server.configure"
OURS = ("miles-plugins", "miles_core", "miles_engines")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Note:
    """What a process of SGLang left: its id, and why the plugins could not be run, if they could not."""

    pid: int
    error: str | None


class Bridge:
    """A folder for one SGLang, with the plugins that have `configure_sglang`; `arguments` are SGLang's flags."""

    def __init__(self, plugins: Sequence[Plugin], arguments: Sequence[str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="miles-sglang-"))
        shutil.copy(bridge_module.__file__, self.folder / f"{MODULE}.py")
        info = self.folder / f"{MODULE}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {MODULE}\nVersion: 1\n", "utf-8")
        (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{ENTRY_POINT} = {MODULE}:start\n", "utf-8")
        (self.folder / "plan.json").write_text(json.dumps(plan(plugins, arguments)), "utf-8")
        self._notes = self.folder / "ran"
        self._notes.mkdir()

    def notes(self) -> Iterator[Note]:
        """Of every process that has got as far."""
        for path in sorted(self._notes.glob("[0-9]*.json")):
            yield Note(**json.loads(path.read_text("utf-8")))

    def forget(self) -> None:
        """Drop the notes, before SGLang is started again."""
        for path in self._notes.iterdir():
            path.unlink()

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """What SGLang's environment variables are to have on top."""
        path = [str(self.folder), *filter(None, [environ.get("PYTHONPATH")])]
        chosen = environ.get("SGLANG_PLUGINS")
        return {
            "PYTHONPATH": ":".join(path),
            **({"SGLANG_PLUGINS": f"{chosen},{ENTRY_POINT}"} if chosen else {}),
        }

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def plan(plugins: Sequence[Plugin], arguments: Sequence[str]) -> dict[str, Any]:
    """What the module in the folder reads: the plugins, SGLang's flags, and where packages lie."""
    own = {top(plugin.record.target or plugin.record.name) for plugin in plugins}
    distributions = {plugin.record.distribution for plugin in plugins if plugin.record.distribution}
    needed = {name for each in requirements([OURS[0], *distributions]) for name in tops(each)}
    return {
        "module": CONFIGURE,
        "arguments": list(arguments),
        "own": places([*OURS[1:], *sorted(own)]),
        "needed": places(sorted(needed - own)),
        "plugins": [
            {name: getattr(plugin.record, name) for name in ("kind", "name", "distribution", "version", "target")}
            for plugin in plugins
        ],
    }


def top(target: str) -> str:
    """The top-level package of an entry point's target, or of a dotted path."""
    return target.partition(":")[0].partition(".")[0]


def requirements(names: Iterable[str]) -> list[metadata.Distribution]:
    """The installed distributions of these names and everything that they need, without extras."""
    found: dict[str, metadata.Distribution] = {}
    left = list(names)
    while left:
        name = left.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in found:
            continue
        try:
            found[key] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # needed on another platform only, or something else provides it
        for requirement in found[key].requires or ():
            match = _NAME.match(requirement)
            if match and "extra ==" not in requirement.partition(";")[2].replace("extra==", "extra =="):
                left.append(match[0])
    return list(found.values())


def tops(distribution: metadata.Distribution) -> set[str]:
    """The top-level packages and modules of an installed distribution."""
    names = set()
    for file in distribution.files or ():
        first = file.parts[0]
        if len(file.parts) > 1 and file.suffix in (".py", ".so", ".pyd"):
            names.add(first)
        elif len(file.parts) == 1 and file.suffix in (".py", ".so", ".pyd"):
            names.add(first.partition(".")[0])
    return {name for name in names if name.isidentifier()}


def places(names: Iterable[str]) -> dict[str, str]:
    """In which directory each top-level package or module lies; those that cannot be found are left out."""
    found = {}
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None and spec.has_location:
            file = Path(spec.origin)
            found[name] = str((file.parent if spec.submodule_search_locations else file).parent)
    return found
