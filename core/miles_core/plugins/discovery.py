"""Read what is installed: every entry point in a group of ours, from the metadata alone.

A distribution can be seen more than once (links, an egg-info beside its dist-info, a stale directory); one of
them is taken, whatever the order on disk. Metadata that cannot be read becomes a Problem if it concerns us.

The files are read here, not through `importlib.metadata`: there, one bad line costs a distribution all its
entry points, and which of two same distributions counts depends on the path; importing it would also be a
quarter of the time that `list` takes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from miles_core.plugins.kinds import GROUP_PREFIX, KIND_OF_GROUP
from miles_core.plugins.records import BUILTIN_DISTRIBUTION, PluginRecord, Problem, State
from miles_core.plugins.selector import NAME, normalized
from miles_core.plugins.target import TARGET
from miles_core.plugins.wording import meant

_ENTRY_POINTS = "entry_points.txt"
_GROUPS = re.compile(rb"\[\s*" + re.escape(GROUP_PREFIX.encode()))


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

    def read(self) -> None:
        """Add a record per entry point of ours; a file that names no group of ours is not looked at further."""
        raw = _bytes(self._file)
        if _GROUPS.search(raw) is None:
            return
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            self._problem(
                f"is not UTF-8 (byte {error.start} is {raw[error.start]:#04x})",
                "its plugins are not listed; reinstall it, or tell its author",
            )
        else:
            self._read_entries(text)

    def _read_entries(self, text: str) -> None:
        name, version = self._identity()
        seen: dict[tuple[str, str], PluginRecord] = {}
        for number, group, line in _lines(text):
            entry, equals, value = (part.strip() for part in line.partition("="))
            if line.startswith("["):
                self._problem(f"line {number} is a group without its closing bracket", "tell its author")
            elif group not in KIND_OF_GROUP:
                self._unknown_group(group)
            elif not (entry and equals and value):
                self._problem(f'line {number} is not "name = module": {line!r}', "tell its author")
            else:
                record = self._record(group, entry, value, name, version)
                self._add(record, seen.setdefault((group, entry), record))

    def _record(self, group: str, entry: str, value: str, distribution: str, version: str) -> PluginRecord:
        match = TARGET.fullmatch(value)
        module, attribute, extras = match.group("module", "attribute", "extras") if match else (value, None, None)
        record = PluginRecord(
            kind=KIND_OF_GROUP[group].name,
            name=entry,
            distribution=distribution,
            version=version,
            target=f"{module}:{attribute}" if attribute else module,
            extras=tuple(extra.strip() for extra in (extras or "").split(",") if extra.strip()),
            builtin=distribution == BUILTIN_DISTRIBUTION,
            location=os.path.dirname(self._candidate.path),
        )
        if match is None:
            record.mark(State.FAILED, "does not name a module or module:attribute", "tell its author")
        elif not NAME.fullmatch(entry):
            record.mark(State.FAILED, "has a name with more than a-z, 0-9 and _", "ask its author to rename it")
        return record

    def _add(self, record: PluginRecord, first: PluginRecord) -> None:
        """Add a record, unless its distribution has one of that name: then neither can be meant by it."""
        if first is record:
            self._records.append(record)
        elif first.target != record.target:
            what = f"has the same name as {record.target} in the same distribution"
            first.mark(State.FAILED, what, "ask its author to rename one")

    def _identity(self) -> tuple[str, str]:
        """Name and version from the metadata, else from the directory's name."""
        headers = _headers(self._candidate.path)
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

    def _unknown_group(self, group: str) -> None:
        """A group under our prefix that nothing reads is reported if one of ours was probably meant."""
        close = meant(group, KIND_OF_GROUP, cutoff=0.8)
        if close:
            self._problem(f"has a group {group!r} that nothing reads", f"did its author mean {close}?")

    def _problem(self, what: str, advice: str) -> None:
        problem = Problem(self._file, what, advice)
        if problem not in self._problems:
            self._problems.append(problem)

    @property
    def _file(self) -> str:
        return os.path.join(self._candidate.path, _ENTRY_POINTS)


def _lines(text: str) -> Iterator[tuple[int, str, str]]:
    """Line number, group and text of every line in a group of ours, and of group lines that are cut off."""
    group = ""
    for number, raw in enumerate(text.lstrip("\ufeff").splitlines(), 1):
        line = raw.strip()
        if line.startswith("[") and line.endswith("]"):
            group = line[1:-1].strip()
        elif line.startswith("[") or (group.startswith(GROUP_PREFIX) and line and line[0] not in "#;"):
            yield number, group, line


def _headers(info: str) -> dict[str, str]:
    """Name and version in the metadata directory's METADATA or PKG-INFO; the description is left alone."""
    raw = _bytes(os.path.join(info, "METADATA")) or _bytes(os.path.join(info, "PKG-INFO"))
    headers: dict[str, str] = {}
    for line in raw.decode("utf-8", "replace").splitlines():
        if not line.strip():
            break
        key, _, value = line.partition(":")
        if key.lower() in ("name", "version") and value.strip():
            headers.setdefault(key.lower(), value.strip())
    return headers


def _bytes(path: str) -> bytes:
    """What is in a file; nothing if it is not there, or may not be read, as Python's own import has it."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
