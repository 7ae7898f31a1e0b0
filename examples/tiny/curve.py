"""How training goes: a line per step, a file with all of them, and a drawing."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

SCHEMA = 1

HEADING = "step  reward  right     tokens  log-prob diff  gradient  rollouts  update"

WIDTH, LEFT, PLOT = 640, 60, 520
"""Pixels: the drawing, its left margin, and the width of a plot."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step: rollouts of the weights as they were, then the update. `seconds` are wall-clock time."""

    step: int
    reward: float
    """Mean over the step's rollouts."""
    samples: int
    tokens: int
    difference: float
    """The largest one between a sampled token's log-prob of the trainer and that of the rollout."""
    gradient: float
    rollout_seconds: float
    update_seconds: float

    def __str__(self) -> str:
        right = f"{self.reward * self.samples:.0f}/{self.samples}"
        return (
            f"{self.step:>4}  {self.reward:>6.3f} {right:>8}  {self.tokens:>7,}  {self.difference:>13.1e}  "
            f"{self.gradient:>8.3f}  {self.rollout_seconds:>6.1f} s  {self.update_seconds:>4.1f} s"
        )


@dataclass
class Curve:
    """All steps, and the mean reward of each held-out prompt before the first and after the last."""

    settings: dict[str, Any]
    steps: list[Step] = field(default_factory=list)
    before: Sequence[float] = ()
    after: Sequence[float] = ()
    seconds: float = 0.0

    @property
    def rise(self) -> tuple[float, float]:
        """How much the held-out mean reward rose, and the standard error of that over the prompts."""
        gains = [then - now for now, then in zip(self.before, self.after, strict=True)]
        return fmean(gains), (stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.inf)

    @property
    def difference(self) -> float:
        """The largest one of all steps."""
        return max((step.difference for step in self.steps), default=0.0)

    def write(self, folder: Path) -> None:
        """Write `curve.json` and `curve.svg`."""
        held_out = {"before": fmean(self.before), "prompts_before": list(self.before)}
        if self.after:
            rise, error = self.rise
            held_out |= {"after": fmean(self.after), "prompts_after": list(self.after)}
            held_out |= {"rise": rise, "standard_error": error if math.isfinite(error) else None}
        data = {
            "schema": SCHEMA,
            "settings": self.settings,
            "held_out": held_out,
            "largest_log_prob_difference": self.difference,
            "seconds": round(self.seconds, 1),
            "steps": [asdict(step) for step in self.steps],
        }
        (folder / "curve.json").write_text(json.dumps(data, indent=1) + "\n", "utf-8")
        (folder / "curve.svg").write_text(drawing(self), "utf-8")


def drawing(curve: Curve) -> str:
    """An SVG. Above: reward of each step's rollouts, held-out reward at both ends. Below: differences of log-probs."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="450" font-family="sans-serif" '
            'font-size="12">',
            '<rect width="100%" height="100%" fill="white"/>',
            *_rewards(curve, Frame(top=30, height=230, low=0.5, high=1.0, steps=len(curve.steps))),
            *_differences(curve, Frame(top=310, height=90, low=-8.0, high=-2.0, steps=len(curve.steps))),
            f'<text x="{LEFT + PLOT / 2}" y="440" text-anchor="middle">step</text>',
            "</svg>\n",
        ]
    )


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Where a plot is: `top` and `height` in pixels, what its lower and upper edges mean, and how many steps."""

    top: float
    height: float
    low: float
    high: float
    steps: int

    def at(self, step: float, value: float) -> tuple[float, float]:
        """The pixel of a value; one outside is drawn on the edge. Step 0 is left, the last one right."""
        share = min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)
        return LEFT + PLOT * step / max(self.steps, 1), self.top + self.height * (1 - share)

    def grid(self, title: str, marks: dict[float, str]) -> list[str]:
        """Title, frame, and a line with its text for each mark."""
        out = [
            f'<text x="{LEFT}" y="{self.top - 10}" font-weight="bold">{title}</text>',
            f'<rect x="{LEFT}" y="{self.top}" width="{PLOT}" height="{self.height}" fill="none" stroke="#888"/>',
        ]
        for value, text in marks.items():
            _, y = self.at(0, value)
            out += [
                f'<line x1="{LEFT}" y1="{y:.1f}" x2="{LEFT + PLOT}" y2="{y:.1f}" stroke="#ddd"/>',
                f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>',
            ]
        every = max(1, round(self.steps / 10))
        for step in range(0, self.steps + 1, every):
            x, y = self.at(step, self.low)
            out.append(f'<text x="{x:.1f}" y="{y + 15:.1f}" text-anchor="middle">{step}</text>')
        return out

    def line(self, points: Sequence[tuple[float, float]], colour: str) -> list[str]:
        """A line through `(step, value)`, with a dot on each."""
        pixels = [self.at(step, value) for step, value in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
        dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in pixels]
        return [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>', *dots]


def _rewards(curve: Curve, frame: Frame) -> list[str]:
    lowest = min([*(step.reward for step in curve.steps), fmean(curve.before), frame.low])
    if lowest < frame.low:
        frame = Frame(top=frame.top, height=frame.height, low=0.0, high=1.0, steps=frame.steps)
    count = round((frame.high - frame.low) * 10)
    out = frame.grid("mean reward", {frame.low + at / 10: f"{frame.low + at / 10:.1f}" for at in range(count + 1)})
    # the rollouts of step 1 are of the weights after 0 updates
    out += frame.line([(step.step - 1, step.reward) for step in curve.steps], "#1f77b4")
    ends = [(0, fmean(curve.before))] + ([(frame.steps, fmean(curve.after))] if curve.after else [])
    for step, value in ends:
        x, y = frame.at(step, value)
        side = "start" if step == 0 else "end"
        out += [
            f'<rect x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10" fill="#d62728"/>',
            f'<text x="{x + (9 if step == 0 else -9):.1f}" y="{y + 18:.1f}" fill="#d62728" text-anchor="{side}">'
            f"held out {value:.3f}</text>",
        ]
    return out


def _differences(curve: Curve, frame: Frame) -> list[str]:
    out = frame.grid(
        "largest difference of log-probs, trainer and rollout", {-3: "1e-3", **{at: f"1e{at}" for at in (-8, -6, -4)}}
    )
    points = [(step.step - 1, math.log10(max(step.difference, 1e-12))) for step in curve.steps]
    return out + frame.line(points, "#2e8b57")
