"""Improve the tiny model on its task by GRPO, with samples of this project's rollouts.

python examples/tiny/train.py

Each step samples fresh prompts with the `calculator` agent, through a session server and the built-in engine; updates
the weights from the samples; and has the engine load them. Nothing is trained on that the weights being
trained did not sample, and the trainer's own log-probs prove it at every step.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from curve import HEADING, Curve, Step
from serving import Serving, reward_of, serving
from task import make_prompts

from miles_core import MilesError, Sample

if TYPE_CHECKING:
    from grpo import Trainer

HERE = Path(__file__).parent
NEEDED = ("torch", "transformers", "openai")
PROMPTS = 64
"""In `prompts.jsonl`."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The command line."""

    model: Path
    out: Path
    steps: int
    prompts: int
    samples: int
    rate: float
    seed: int
    held_out: int
    held_out_samples: int


class SettingsError(MilesError):
    """A flag's value cannot be used."""


def parse_args(argv: Sequence[str] | None = None) -> Settings:
    parser = argparse.ArgumentParser(
        description="Improve the tiny model on its task by GRPO, with samples of this project's rollouts.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", type=Path, default=HERE / "model", help="what to start from")
    parser.add_argument("--out", type=Path, default=Path("train-output"), help="for curve.json, curve.svg and model/")
    parser.add_argument("--steps", type=_count(1), default=40, help="rounds of rollouts and updates")
    parser.add_argument("--prompts", type=_count(1), default=16, help="fresh prompts of a step")
    parser.add_argument("--samples", type=_count(2), default=8, help="rollouts of each, a group")
    parser.add_argument("--rate", type=_rate, default=3e-4, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts, and of the engine")
    parser.add_argument(
        "--held-out", type=_count(1, PROMPTS), default=64, help="prompts to evaluate on, of prompts.jsonl"
    )
    parser.add_argument("--held-out-samples", type=_count(1), default=8, help="rollouts of each, twice")
    return Settings(**vars(parser.parse_args(argv)))


def _count(least: int, most: int | None = None) -> Callable[[str], int]:
    def count(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a whole number, got {text}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        if most is not None and value > most:
            raise argparse.ArgumentTypeError(f"must be at most {most}, got {value}")
        return value

    return count


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1, got {text}")
    return value


def check(settings: Settings) -> None:
    """Raise SettingsError for what would fail, or overwrite the model, after the engine has started."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise SettingsError(f"training needs {', '.join(missing)}: pip install 'miles-plugins[local,agents]'")
    if (settings.out / "model").resolve() == settings.model.resolve():
        raise SettingsError(f"--out {settings.out}: its model/ is the model to start from; choose another folder")
    try:
        settings.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"--out {settings.out}: cannot be made: {error.strerror}") from error


class Training:
    """A model under training, the engine that has its weights, and the curve so far."""

    def __init__(self, settings: Settings, trainer: Trainer, serving: Serving) -> None:
        self.settings, self.trainer, self.serving = settings, trainer, serving
        shown = asdict(settings) | {"model": settings.model.name, "out": settings.out.name}
        self.curve = Curve(shown)
        lines = (HERE / "prompts.jsonl").read_text("utf-8").splitlines()
        self._held_out = [json.loads(line) for line in lines]
        self._expressions = {prompt["metadata"]["expression"] for prompt in self._held_out}
        self._rng = random.Random(settings.seed)
        self.version = version_of(0)

    def run(self) -> None:
        """Evaluate, train, evaluate; what there is of the curve is written after every step."""
        began = time.monotonic()
        self.curve.before = self.evaluate()
        print(f"held out, before: {fmean(self.curve.before):.3f}\n\n{HEADING}", flush=True)
        for number in range(1, self.settings.steps + 1):
            step = self.step(number)
            print(step, flush=True)
            self.curve.steps.append(step)
            self.curve.seconds = time.monotonic() - began
            self.curve.write(self.settings.out)
        self.curve.after = self.evaluate()
        self.curve.seconds = time.monotonic() - began
        self.curve.write(self.settings.out)

    def step(self, number: int) -> Step:
        """Sample, update the weights, and have the engine load them."""
        started = time.monotonic()
        prompts = make_prompts(self.settings.prompts, self._rng, self._expressions)
        samples = self.sample(prompts, self.settings.samples)
        sampled = time.monotonic()
        reward = fmean(reward_of(sample) for sample in samples)
        update = self.trainer.update(samples)
        self.trainer.save(self.settings.out / "model")
        self.version = version_of(number)
        self.serving.load(self.settings.out / "model", self.version)
        return Step(
            step=number,
            reward=reward,
            samples=len(samples),
            tokens=update.tokens,
            difference=update.difference,
            gradient=update.gradient,
            rollout_seconds=sampled - started,
            update_seconds=time.monotonic() - sampled,
        )

    def evaluate(self) -> list[float]:
        """The mean reward of each held-out prompt; none of them is trained on."""
        prompts = self._held_out[: self.settings.held_out]
        rewards: dict[int | None, list[float]] = defaultdict(list)
        for sample in self.sample(prompts, self.settings.held_out_samples):
            rewards[sample.group_index].append(reward_of(sample))
        return [fmean(rewards[at]) for at in range(len(prompts))]

    def sample(self, prompts: Sequence[dict[str, Any]], count: int) -> list[Sample]:
        """Rollouts, every turn of which was sampled by the current weights; raises MilesError otherwise.

        A rollout that failed is logged, and its group goes on without it.
        """
        samples = self.serving.sample(prompts, count)
        if {sample.group_index for sample in samples} != set(range(len(prompts))):
            raise MilesError("every rollout of a prompt failed; the log above says why")
        for sample in samples:
            if set(sample.weight_versions) != {self.version}:
                raise MilesError(f"sample {sample.index} is of weights {sample.weight_versions}, not {self.version}")
        return samples


def version_of(step: int) -> str:
    """What the engine calls the weights after so many updates."""
    return f"step-{step}"


def train(settings: Settings) -> Curve:
    """Do it all; what was trained is in `out/model`."""
    check(settings)
    # read when torch is imported: on a busy machine, threads that spin make each other wait
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from grpo import Trainer

    with serving(settings.model, version_of(0), settings.seed) as place:
        training = Training(settings, Trainer(settings.model, settings.rate, settings.steps), place)
        training.run()
    return training.curve


def main(argv: Sequence[str] | None = None) -> int:
    settings = parse_args(argv)
    try:
        curve = train(settings)
    except MilesError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\ninterrupted; what was trained so far is in {settings.out}", file=sys.stderr)
        return 130
    rise, error_of_it = curve.rise
    print(f"\nheld out, after:  {fmean(curve.after):.3f}  ({rise:+.3f} ± {error_of_it:.3f})")
    print(f"largest log-prob difference {curve.difference:.1e}, {curve.seconds:.0f} s")
    print(f"curve: {settings.out / 'curve.svg'}, {settings.out / 'curve.json'}; model: {settings.out / 'model'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
