"""Read what is installed: every entry point in a group of ours, from the metadata alone.

A distribution can be seen more than once (links, an egg-info beside its dist-info, a stale directory); one of
them is taken, whatever the order on disk. Metadata that cannot be read becomes a Problem if it concerns us.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from importlib_metadata import Distribution, EntryPoint

from miles_core.plugins.kinds import GROUP_PREFIX, KIND_OF_GROUP
from miles_core.plugins.records import BUILTIN_DISTRIBUTION, PluginRecord, Problem, State
from miles_core.plugins.selector import NAME, normalized
from miles_core.plugins.wording import meant

_ENTRY_POINTS = "entry_points.txt"


@dataclass(frozen=True)
class _Candidate:
    """One metadata directory: what its path says, before anything in it is read."""

    path: str
    stem: str
    egg: bool
    order: int

    @property
    def name(self) -> str:
        return normalized(self.stem.partition("-")[0])

    @property
    def version(self) -> str:
        return self.stem.partition("-")[2].partition("-py")[0]

    def rank(self) -> tuple[bool, bool, int, str]:
        """Smallest is taken: real metadata, then installed over built in place, then first on the path."""
        empty = not any(os.path.isfile(os.path.join(self.path, name)) for name in ("METADATA", "PKG-INFO"))
        return empty, self.egg, self.order, self.path


def installed(path: Iterable[str]) -> tuple[list[PluginRecord], list[Problem]]:
    """Every entry point of ours in the distributions on `path`, and what could not be read.

    A file on the path (a zip) is not searched: what is in it cannot be told from what Python would import
    without reading all of it.
    """
    records: list[PluginRecord] = []
    problems: list[Problem] = []
    for candidates in _by_name(path).values():
        chosen = candidates[0] if len(candidates) == 1 else min(candidates, key=_Candidate.rank)
        _Reader(chosen, records, problems).read()
    return records, problems


def _by_name(path: Iterable[str]) -> dict[str, list[_Candidate]]:
    """Metadata directories by normalised distribution name; a directory reached twice is looked at once."""
    found: dict[str, list[_Candidate]] = {}
    seen: set[str] = set()
    for order, entry in enumerate(path):
        directory = os.path.realpath(entry or os.curdir)
        if directory not in seen:
            seen.add(directory)
            for candidate in _candidates(directory, order):
                found.setdefault(candidate.name, []).append(candidate)
    return found


def _candidates(directory: str, order: int) -> Iterator[_Candidate]:
    try:
        names = os.listdir(directory)
    except OSError:  # absent, a file, or unreadable: Python's own import passes over it as well
        return
    for name in names:
        stem, extension = os.path.splitext(name)
        # pip renames what it is about to remove to `~name`, and leaves it there when it is interrupted
        if extension in (".dist-info", ".egg-info") and not name.startswith("~"):
            yield _Candidate(os.path.join(directory, name), stem, extension == ".egg-info", order)
        elif name == "EGG-INFO":
            egg = os.path.splitext(os.path.basename(directory))[0]
            yield _Candidate(os.path.join(directory, name), egg, True, order)


class _Reader:
    """Reads one distribution's entry points into the lists it is given."""

    def __init__(self, candidate: _Candidate, records: list[PluginRecord], problems: list[Problem]) -> None:
        self._candidate = candidate
        self._records = records
        self._problems = problems
        self._distribution = Distribution.at(candidate.path)

    def read(self) -> None:
        """Add a record per entry point of ours; a distribution that names no group of ours adds nothing."""
        try:
            text = self._distribution.read_text(_ENTRY_POINTS) or ""
        except UnicodeDecodeError as error:
            text = error.object.decode("utf-8", "replace")
            if _concerns_us(text):
                self._problem(
                    f"is not UTF-8 (byte {error.start} is {error.object[error.start]:#04x})",
                    "its plugins are not listed; reinstall it, or tell its author",
                )
            return
        except OSError:
            return
        if _concerns_us(text):
            self._read_entries(text)

    def _read_entries(self, text: str) -> None:
        name, version = self._identity()
        seen: dict[tuple[str, str], PluginRecord] = {}
        for number, group, line in _lines(text):
            if group not in KIND_OF_GROUP:
                self._unknown_group(number, group)
                continue
            entry, equals, value = (part.strip() for part in line.partition("="))
            if not equals or not entry or not value:
                self._problem(
                    f"line {number} is not `name = module`: {line!r}", "the line is left out; tell its author"
                )
                continue
            record = self._record(group, entry, value, name, version)
            twin = seen.setdefault((group, entry), record)
            if twin is record:
                self._records.append(record)
            elif twin.target != record.target:
                advice = "one of the two needs another name; tell its author"
                twin.mark(State.FAILED, f"and {record.target} have one name in one distribution", advice)

    def _record(self, group: str, entry: str, value: str, distribution: str, version: str) -> PluginRecord:
        target, _, extras = value.partition("[")
        record = PluginRecord(
            kind=KIND_OF_GROUP[group].name,
            name=entry,
            distribution=distribution,
            version=version,
            target=re.sub(r"\s*:\s*", ":", target.strip()),
            extras=tuple(extra.strip() for extra in extras.rstrip("] ").split(",") if extra.strip()),
            builtin=distribution == BUILTIN_DISTRIBUTION,
            location=os.path.dirname(self._candidate.path),
        )
        if not NAME.fullmatch(entry):
            record.mark(
                State.FAILED, "has a name with more than a-z, 0-9 and _", "its author has to rename it"
            )
        elif EntryPoint.pattern.match(value) is None:
            record.mark(State.FAILED, "does not name a module or module:attribute", "tell its author")
        return record

    def _identity(self) -> tuple[str, str]:
        """Name and version from the metadata, else from the directory's name."""
        headers = _headers(self._distribution)
        if "name" not in headers:
            self._problems.append(
                Problem(
                    self._candidate.path,
                    "has metadata without a name",
                    f"taken for {self._candidate.name}, as the directory is called; reinstall it",
                    lost=False,
                )
            )
        name = normalized(headers.get("name") or self._candidate.name)
        return name, headers.get("version") or self._candidate.version

    def _unknown_group(self, number: int, group: str) -> None:
        """Groups of ours that nobody reads are reported only if one of ours was probably meant."""
        close = meant(group, KIND_OF_GROUP)
        if close and not any(p.where == self._file and repr(group) in p.what for p in self._problems):
            self._problem(f"has a group {group!r} that nothing reads", f"did its author mean {close}?")

    def _problem(self, what: str, advice: str) -> None:
        self._problems.append(Problem(self._file, what, advice))

    @property
    def _file(self) -> str:
        return os.path.join(self._candidate.path, _ENTRY_POINTS)


def _concerns_us(text: str) -> bool:
    return f"[{GROUP_PREFIX}" in text.replace(" ", "")


def _lines(text: str) -> Iterator[tuple[int, str, str]]:
    """Line number, group and text of every line in a group of ours."""
    group = ""
    for number, raw in enumerate(text.lstrip("\ufeff").splitlines(), 1):
        line = raw.strip()
        if line.startswith("[") and line.endswith("]"):
            group = line[1:-1].strip()
        elif line and not line.startswith(("#", ";")) and group.startswith(GROUP_PREFIX):
            yield number, group, line


def _headers(distribution: Distribution) -> dict[str, str]:
    """Name and version; read as text, since parsing a long description as e-mail costs more than all else."""
    headers: dict[str, str] = {}
    for line in _metadata(distribution).splitlines():
        if not line.strip():
            break
        key, _, value = line.partition(":")
        if key.lower() in ("name", "version") and value.strip():
            headers.setdefault(key.lower(), value.strip())
    return headers


def _metadata(distribution: Distribution) -> str:
    for name in ("METADATA", "PKG-INFO"):
        try:
            text = distribution.read_text(name)
        except UnicodeDecodeError as error:
            text = error.object.decode("utf-8", "replace")
        except OSError:
            text = None
        if text:
            return text
    return ""
