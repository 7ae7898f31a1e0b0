"""Figures: one measurement each, kept as JSON, compared with the run before, and drawn."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measurement against its bar; lower is better."""

    name: str
    value: float
    bar: float
    unit: str
    detail: Mapping[str, float] = field(default_factory=dict)
    """What it was made from."""

    @property
    def over(self) -> bool:
        """Whether it misses its bar."""
        return self.value > self.bar


def lines(figures: Sequence[Figure], before: Mapping[str, float]) -> Iterable[str]:
    """A table of the figures, each with its bar and the value of an earlier run."""
    width = max(len(figure.name) for figure in figures)
    for figure in figures:
        then = f"{before[figure.name]:>9.2f}" if figure.name in before else " " * 9
        verdict = "OVER" if figure.over else ""
        made_of = ", ".join(f"{name} {value:.4g}" for name, value in figure.detail.items())
        now = f"{figure.name:<{width}} {figure.value:>9.2f} {figure.bar:>7g} {figure.unit:<5}"
        yield f"{now} {then}  {verdict:<5} {made_of}".rstrip()


def heading(figures: Sequence[Figure]) -> str:
    """What stands above the table."""
    width = max(len(figure.name) for figure in figures)
    return f"{'':<{width}} {'NOW':>9} {'BAR':>7} {'':<5} {'BEFORE':>9}"


def previous(folder: Path) -> dict[str, float]:
    """The values of the run before this one, by name; empty if there was none."""
    try:
        found = json.loads((folder / "last.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return {row["name"]: row["value"] for row in found["figures"]} if found.get("schema") == SCHEMA else {}


def keep(figures: Sequence[Figure], folder: Path) -> None:
    """Write `last.json` and `last.svg`; the run before becomes `previous.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    last = folder / "last.json"
    if last.exists():
        last.replace(folder / "previous.json")
    write_json(figures, last)
    (folder / "last.svg").write_text(chart(figures), "utf-8")


def write_json(figures: Sequence[Figure], file: Path) -> None:
    """The figures as data."""
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "time": round(time.time()),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "figures": [{**asdict(figure), "over": figure.over} for figure in figures],
    }
    file.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", "utf-8")


def chart(figures: Sequence[Figure]) -> str:
    """A drawing: every figure as a share of its bar, which is the line."""
    row, left, scale = 22, 430, 260
    height = row * len(figures) + 30
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + 2 * scale + 90}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left + scale}" y="14" text-anchor="middle">the bar</text>',
    ]
    for number, figure in enumerate(figures):
        y = 20 + number * row
        length = min(figure.value / figure.bar, 2.0) * scale
        colour = "#c0392b" if figure.over else "#2e8b57"
        out += [
            f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{escape(figure.name)}</text>',
            f'<rect x="{left}" y="{y + 3}" width="{length:.1f}" height="{row - 6}" fill="{colour}"/>',
            f'<text x="{left + length + 6:.1f}" y="{y + 15}">{figure.value:.2f} {escape(figure.unit)}</text>',
        ]
    at = left + scale
    out += [f'<line x1="{at}" y1="18" x2="{at}" y2="{height - 6}" stroke="black" stroke-dasharray="4"/>', "</svg>"]
    return "\n".join(out) + "\n"
