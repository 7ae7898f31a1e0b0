"""What a server has done and what it is doing, in Prometheus' text format.

Counted in plain numbers, since it is counted in every turn, and written when it is asked for. Numbers of several
processes are told apart by the label `process`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles_core.engine.route import Worker
from miles_core.errors import BodyTooLarge, EngineError, MilesError, Overloaded
from miles_core.session.tree import TurnFacts

TEXT = b"text/plain; version=0.0.4; charset=utf-8"

QUICK = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
SLOW = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0)

Sample = tuple[str, dict[str, str], float]
"""What follows the family's name, the labels, the value."""


@dataclass(frozen=True)
class Family:
    """One metric as it is written: its `kind` is counter, gauge or histogram."""

    name: str
    kind: str
    help: str
    samples: Sequence[Sample]


class Histogram:
    """Durations in seconds by upper bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def samples(self, labels: dict[str, str]) -> Iterator[Sample]:
        """Cumulative buckets, sum and count."""
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            yield "_bucket", {**labels, "le": _number(bound)}, total
        yield "_sum", labels, self._sum
        yield "_count", labels, total


@dataclass
class Metrics:
    """The counters of one process; every method is called in its event loop."""

    turns: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    created: int = 0
    phases: dict[str, Histogram] = field(
        default_factory=lambda: {
            "prepare": Histogram(QUICK), "engine": Histogram(SLOW), "commit": Histogram(QUICK)
        }
    )  # fmt: skip

    def phase(self, name: str, seconds: float) -> None:
        """A phase of a turn took so long."""
        self.phases[name].observe(seconds)

    def failed(self, error: BaseException) -> None:
        """A turn ended with an error."""
        self.turns[_outcome(error)] += 1


class TurnCount:
    """How one turn ends: what is said first counts, and one of which nothing was said was left by its client."""

    __slots__ = ("_metrics", "_open")

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._open = True

    def ended(self, outcome: str) -> None:
        """It ended like this."""
        if self._open:
            self._open = False
            self._metrics.turns[outcome] += 1

    def failed(self, error: BaseException) -> None:
        """It ended with an error."""
        self.ended(_outcome(error))

    def committed(self, facts: TurnFacts, completion: int) -> None:
        """It was committed, with so many sampled tokens."""
        self.ended("committed")
        tokens = self._metrics.tokens
        tokens["prompt"] += facts.prompt_tokens
        tokens["cached"] += facts.cached_tokens
        tokens["completion"] += completion


OUTCOMES = (
    "committed", "not_committed", "aborted", "engine_refused", "engine_failed", "request_refused", "overloaded",
    "client_left", "server_error",
)  # fmt: skip
"""`not_committed`: answered, but the session was closed or another turn came first."""


def _outcome(error: BaseException) -> str:
    if not isinstance(error, MilesError):
        return "server_error" if isinstance(error, Exception) else "client_left"
    if isinstance(error, EngineError):
        return "engine_failed"
    if isinstance(error, Overloaded):
        return "overloaded"
    return "request_refused" if error.status < 500 or isinstance(error, BodyTooLarge) else "server_error"


def families(metrics: Metrics, workers: Iterable[Worker], *, sessions: int, in_flight: int) -> list[Family]:
    """Everything there is to tell of a process."""
    tokens = metrics.tokens
    share = tokens["cached"] / tokens["prompt"] if tokens["prompt"] else 0.0
    phases = [row for name, found in metrics.phases.items() for row in found.samples({"phase": name})]
    return [
        Family("miles_turns", "counter", "Turns by how they ended.", [
            ("_total", {"outcome": outcome}, metrics.turns[outcome]) for outcome in OUTCOMES
        ]),
        Family("miles_turn_phase_seconds", "histogram", "How long the phases of turns took.", phases),
        Family("miles_tokens", "counter", "Tokens of committed turns; cached ones are among those of prompts.", [
            ("_total", {"kind": kind}, tokens[kind]) for kind in ("prompt", "cached", "completion")
        ]),
        Family("miles_prefix_cache_share", "gauge", "Cached prompt tokens by prompt tokens, since the start.", [
            ("", {}, share)
        ]),
        Family("miles_sessions_created", "counter", "Sessions created.", [("_total", {}, metrics.created)]),
        Family("miles_sessions_open", "gauge", "Sessions open now.", [("", {}, sessions)]),
        Family("miles_turns_in_flight", "gauge", "Turns that wait for an engine now.", [("", {}, in_flight)]),
        *_worker_families(list(workers)),
    ]  # fmt: skip


def _worker_families(workers: Sequence[Worker]) -> Iterator[Family]:
    def family(name: str, kind: str, help_: str, suffix: str, values: Sequence[float]) -> Family:
        rows = zip(workers, values, strict=True)
        return Family(name, kind, help_, [(suffix, {"engine": _shown(worker.url)}, value) for worker, value in rows])

    yield family("miles_engine_healthy", "gauge", "1 if the worker passes its health checks.", "",
                 [float(w.healthy) for w in workers])  # fmt: skip
    yield family("miles_engine_draining", "gauge", "1 if the worker is to be left.", "",
                 [float(w.draining) for w in workers])  # fmt: skip
    yield family("miles_engine_sessions", "gauge", "Sessions that keep to the worker.", "",
                 [w.sessions for w in workers])  # fmt: skip
    yield family("miles_engine_turns_in_flight", "gauge", "Turns that run there now.", "",
                 [w.in_flight for w in workers])  # fmt: skip
    yield family("miles_engine_errors", "counter", "Requests that could not be made, or broke off.", "_total",
                 [w.errors for w in workers])  # fmt: skip


def _shown(url: str) -> str:
    """A URL without the name and password that it may carry."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def as_json(found: Sequence[Family]) -> list[Any]:
    """Families as they travel from one process to another."""
    return [[f.name, f.kind, f.help, [list(sample) for sample in f.samples]] for f in found]


def text(processes: Mapping[str, Sequence[Any]]) -> bytes:
    """The page: `as_json` of each process, by its number."""
    heads: dict[str, tuple[str, str]] = {}
    rows: dict[str, list[str]] = {}
    for process, found in processes.items():
        for name, kind, help_, samples in found:
            heads[name] = (kind, help_)
            for suffix, labels, value in samples:
                rows.setdefault(name, []).append(_line(name + suffix, {**labels, "process": process}, value))
    lines = []
    for name, (kind, help_) in heads.items():
        full = f"{name}_total" if kind == "counter" else name  # this format names counters with their suffix
        lines += [f"# HELP {full} {help_}", f"# TYPE {full} {kind}", *rows.get(name, ())]
    return "\n".join([*lines, ""]).encode()


def _line(name: str, labels: dict[str, str], value: float) -> str:
    return f"{name}{{{','.join(f'{key}={_quoted(text)}' for key, text in labels.items())}}} {_number(value)}"


def _quoted(value: str) -> str:
    escaped = value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return f'"{escaped}"'


def _number(value: float) -> str:
    return "+Inf" if value == float("inf") else repr(value)
